// The page: the header, and the view that the address asks for.

import { useEffect, useState } from "preact/hooks";
import { useKeys, type Shortcut } from "./keys.ts";
import { useNews } from "./news.ts";
import { count, Empty, Problem } from "./parts/bits.tsx";
import { source } from "./source.ts";
import { flip } from "./theme.ts";
import type { Workspace } from "./types.ts";
import { link, usePlace } from "./url.ts";
import { Approvals } from "./views/approvals.tsx";
import { Help } from "./views/help.tsx";
import { Home } from "./views/home.tsx";
import { RunPage } from "./views/run.tsx";

export function App() {
  const place = usePlace();
  const run = place.run || source.only;
  const { workspace, view, version, connected, error } = useNews(run);
  const [dialog, setDialog] = useState<"" | "help" | "approvals">("");
  const live: Shortcut[] = [
    { keys: ["h"], does: "All runs", run: () => (location.hash = "#") },
    { keys: ["a"], does: "Approvals", run: () => setDialog("approvals") },
  ];
  useKeys([
    ...(source.live ? live : []),
    { keys: ["t"], does: "Light or dark", run: flip },
    { keys: ["?"], does: "These keys", run: () => setDialog("help") },
  ]);
  const here = run && view?.run.id === run ? view : undefined;
  useEffect(() => {
    document.title = here ? `${here.run.title || here.run.mark} · WINK` : "WINK debugger";
  }, [here?.run.title]);
  const skip = (event: MouseEvent) => {
    event.preventDefault();
    document.querySelector<HTMLElement>("#main .timeline, #main .run-item, #main")?.focus();
  };
  return (
    <>
      <a class="skip" href="#main" onClick={skip}>Skip to the content</a>
      <Header workspace={workspace} run={run} connected={connected}
        approvals={() => setDialog("approvals")} help={() => setDialog("help")} />
      {source.note && <p class="banner">{source.note}</p>}
      {error && (
        <main id={here ? undefined : "main"} class={here ? undefined : "waiting"}>
          <Problem text={error} />
          {!here && source.live && <p><a href="#">All runs of this directory</a></p>}
        </main>
      )}
      {!run && workspace && <Home workspace={workspace} />}
      {here && workspace && (
        <RunPage key={run} view={here} place={place} workspace={workspace} version={version}
          writable={source.live && workspace.writable} />
      )}
      {!error && (!workspace || (run && !here)) && <main id="main" class="waiting" aria-busy="true"><Empty>Loading…</Empty></main>}
      <div id="news" class="hidden" role="status" aria-live="polite" />
      {dialog === "help" && <Help close={() => setDialog("")} />}
      {dialog === "approvals" && <Approvals approvals={workspace?.approvals ?? []} runs={workspace?.runs ?? []} close={() => setDialog("")} />}
    </>
  );
}

function Header({ workspace, run, connected, approvals, help }: {
  workspace: Workspace | undefined; run: string; connected: boolean; approvals: () => void; help: () => void;
}) {
  const waiting = workspace?.approvals.length ?? 0;
  const running = workspace?.runs.filter((r) => r.state === "running" && r.id !== run) ?? [];
  return (
    <header class="top">
      <nav aria-label="Debugger">
        {source.live ? <a class="brand" href="#">WINK <span>debugger</span></a> : <span class="brand">WINK <span>export</span></span>}
        {workspace?.name && <span class="muted name">{workspace.name}</span>}
        {running.slice(0, 3).map((r) => (
          <a key={r.id} class="live" href={link({ run: r.id })} title={r.title}>
            <span class="dot" aria-hidden="true" />{r.mark}<span class="muted"> {count(r.calls, "call")}, live</span>
          </a>
        ))}
      </nav>
      <span class="grow" />
      {source.live && !connected && <span class="lost" role="status">Connection lost; trying again</span>}
      {source.live && (
        <button type="button" class={waiting ? "primary" : ""} onClick={approvals} title="Approvals (a)">
          Approvals{waiting > 0 && <> <b class="badge">{waiting}</b></>}
        </button>
      )}
      <button type="button" onClick={flip} aria-label="Light or dark" title="Light or dark (t)">◐</button>
      <button type="button" onClick={help} aria-label="Keys" title="Keys (?)">?</button>
    </header>
  );
}
