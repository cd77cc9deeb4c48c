// All runs and branches of the directory.

import { useState } from "preact/hooks";
import { useKeys } from "../keys.ts";
import { count, day, Empty, lasted, money, OutcomeIcon, short, slug, Tag } from "../parts/bits.tsx";
import type { BranchSummary, Outcome, RunResult, RunSummary, Workspace } from "../types.ts";
import { link } from "../url.ts";

export function Home({ workspace }: { workspace: Workspace }) {
  const [wanted, setWanted] = useState("");
  const text = wanted.toLowerCase();
  const runs = [...workspace.runs].sort((a, b) => b.began - a.began)
    .filter((r) => `${r.title} ${r.mark} ${r.model} ${r.branch}`.toLowerCase().includes(text));
  const step = (by: number) => {
    const links = [...document.querySelectorAll<HTMLElement>(".run-item")];
    const now = links.indexOf(document.activeElement as HTMLElement);
    links[Math.min(links.length - 1, Math.max(0, now + by))]?.focus();
  };
  useKeys([
    { keys: ["j", "ArrowDown"], does: "Next run", run: () => step(1) },
    { keys: ["k", "ArrowUp"], does: "Previous run", run: () => step(-1) },
    { keys: ["/"], does: "Find a run", run: () => document.getElementById("search")?.focus() },
  ], 1);
  return (
    <main class="home" id="main">
      <div class="home-head">
        <h1>Runs</h1>
        <p class="muted">{workspace.path}</p>
        <input id="search" type="search" aria-label="Find a run" placeholder="Find a run" value={wanted}
          onInput={(e) => setWanted(e.currentTarget.value)} />
      </div>
      {runs.length === 0 && <Empty>{wanted ? "No run matches." : "No run is recorded here yet. Start one with wink run."}</Empty>}
      <ul class="runs">{runs.map((run) => <RunItem key={run.id} run={run} all={workspace.runs} />)}</ul>
      <h2>Branches</h2>
      {workspace.branches.length === 0
        ? <Empty>No branches. Fork a run at any call to make one.</Empty>
        : <ul class="branches">{workspace.branches.map((b) => <BranchItem key={b.name} branch={b} />)}</ul>}
    </main>
  );
}

export function RunState({ run }: { run: RunSummary }) {
  return <span class={`state is-${run.state}`}><span class="dot" aria-hidden="true" />{run.state}</span>;
}

const SIGNS = { added: "+", changed: "~", deleted: "−" } as const;

function RunOutcome({ result }: { result: RunResult }) {
  const kinds = (["added", "changed", "deleted"] as const).filter((kind) => result.files[kind]);
  return (
    <span class="run-result">
      {kinds.length === 0 ? <span class="muted">no file changed</span> : <span>files{kinds.map((kind) => (
        <span key={kind} class={`kind is-${kind}`}> {SIGNS[kind]}{result.files[kind]}<span class="hidden"> {kind}</span></span>
      ))}</span>}
      {Object.entries(result.outcomes).map(([outcome, n]) => (
        <span key={outcome} class={`outcome is-${slug(outcome)}`}><OutcomeIcon outcome={outcome as Outcome} />{n} {outcome}</span>
      ))}
      {result.exit !== null && <span class={result.exit ? "minus" : "muted"}>exit code {result.exit}</span>}
    </span>
  );
}

function RunItem({ run, all }: { run: RunSummary; all: RunSummary[] }) {
  const [parent, at] = run.forkedFrom?.split("/") ?? [];
  const mark = all.find((r) => r.id === parent)?.mark ?? parent?.slice(0, 8);
  return (
    <li>
      <a class="run-item" href={link({ run: run.id })}>
        <span class="run-title"><strong>{run.title || "(no task)"}</strong></span>
        <RunState run={run} />
        {run.result && <RunOutcome result={run.result} />}
        <span class="run-facts">
          <code>{run.mark}</code>
          <span>{day(run.began)}</span>
          <span>{lasted(Math.max(0, run.saved - run.began))}</span>
          <span>{run.model}</span>
          <span>{count(run.calls, "call")}</span>
          <span>{short(run.tokens)} tokens</span>
          {run.cost !== null && <span>{money(run.cost)}</span>}
          {run.branch && <Tag>branch {run.branch}</Tag>}
          {parent && <Tag>forked from {mark} at call {at}</Tag>}
          {run.dry && <Tag>dry run</Tag>}
          {run.damage && <Tag kind="bad">damaged: {run.damage}</Tag>}
        </span>
      </a>
    </li>
  );
}

function BranchItem({ branch }: { branch: BranchSummary }) {
  const name = <strong>{branch.name}</strong>;
  return (
    <li class="branch-item">
      {branch.run ? <a href={link({ run: branch.run })}>{name}</a> : name}
      <span class="run-facts">
        <span>{day(branch.time)}</span>
        <span>{count(branch.commits, "commit")}</span>
        <span>{count(branch.files.length, "file")} changed</span>
        {branch.inUse && <Tag>in use</Tag>}
      </span>
      {branch.files.length > 0 && (
        <details>
          <summary>Files</summary>
          <ul class="plain mono">{branch.files.slice(0, 200).map((f) => <li key={f}>{f}</li>)}</ul>
        </details>
      )}
    </li>
  );
}
