// The workspace and the open run, kept up to date by the server's events.

import { useEffect, useRef, useState } from "preact/hooks";
import { forget } from "./data.ts";
import { say } from "./keys.ts";
import { merged } from "./model.ts";
import { at, source } from "./source.ts";
import type { Approval, RunSummary, RunView, Workspace } from "./types.ts";

export interface News {
  workspace: Workspace | undefined;
  view: RunView | undefined;
  /** Grows when the record of the open run has grown. */
  version: number;
  connected: boolean;
  error: string;
}

export function useNews(run: string): News {
  const [workspace, setWorkspace] = useState<Workspace>();
  const [view, setView] = useState<RunView>();
  const [version, setVersion] = useState(0);
  const [connected, setConnected] = useState(true);
  const [error, setError] = useState("");
  const open = useRef("");
  const asking = useRef<"" | "now" | "again">("");
  const known = useRef<RunView | undefined>(undefined);
  const latest = useRef<RunSummary | undefined>(undefined);
  open.current = run;
  known.current = view;

  const fail = (e: Error) => setError(e.message);
  const loadWorkspace = () => source.get<Workspace>(at.workspace).then(setWorkspace, fail);
  const load = (id: string) => source.get<RunView>(at.run(id)).then((found) => {
    if (open.current !== id) return;
    setError("");
    setView(found);
    const later = latest.current;
    if (later?.id === id && hasGrown(found.run, later)) update(id);
  }, fail);

  // One request at a time: what happens meanwhile is in the next one.
  const update = (id: string) => {
    if (asking.current) {
      asking.current = "again";
      return;
    }
    asking.current = "now";
    const last = known.current?.run.id === id ? known.current.calls.at(-1)?.n ?? 0 : 0;
    source.get<RunView>(at.run(id, last)).then((news) => {
      if (open.current !== id) return;
      forget(`runs/${id}`);
      setView((old) => (old?.run.id === id && last ? merged(old, news) : news));
      setVersion((n) => n + 1);
      // What is undone or rewound changes earlier rows.
      if (news.calls.some((c) => c.outcome === "undo")) void load(id);
      for (const call of news.calls.filter((c) => c.n > last).slice(-1)) say(`Call ${call.n}, ${call.tool}, ${call.outcome}`);
    }, fail).finally(() => {
      const again = asking.current === "again";
      asking.current = "";
      if (again && open.current) update(open.current);
    });
  };

  useEffect(() => void loadWorkspace(), []);
  useEffect(() => {
    setError("");
    if (run) void load(run);
  }, [run]);
  useEffect(() => {
    const reload = () => {
      forget("");
      void loadWorkspace();
      if (open.current) void load(open.current).then(() => setVersion((n) => n + 1));
    };
    addEventListener("changed", reload);
    let lost = false;
    const stop = source.listen({
      connected: (is) => {
        setConnected(is);
        if (is && lost) reload();
        lost = !is;
      },
      runs: (runs) => {
        setWorkspace((old) => old && { ...old, runs: joined(old.runs, runs) });
        forget("compare");
        for (const { id } of runs) if (id !== open.current) forget(`runs/${id}`);
        const mine = runs.find((r) => r.id === open.current);
        if (!mine) return;
        latest.current = mine;
        const shown = known.current;
        if (shown?.run.id !== mine.id) return; // it is being loaded
        if (hasGrown(shown.run, mine)) update(mine.id);
        else setView((old) => (old?.run.id === mine.id ? { ...old, run: mine } : old));
      },
      approvals: (approvals) => {
        setWorkspace((old) => {
          const fresh = approvals.find((a) => !old?.approvals.some((b: Approval) => b.id === a.id));
          if (fresh) say(`Approval needed: ${fresh.question}`);
          return old && { ...old, approvals };
        });
      },
    });
    return () => {
      removeEventListener("changed", reload);
      stop();
    };
  }, []);
  return { workspace, view, version, connected, error };
}

const hasGrown = (old: RunSummary, now: RunSummary) => old.saved !== now.saved || old.calls !== now.calls;

function joined(old: RunSummary[], news: RunSummary[]): RunSummary[] {
  const again = new Map(news.map((r) => [r.id, r]));
  return [...old.map((r) => again.get(r.id) ?? r), ...news.filter((r) => !old.some((o) => o.id === r.id))];
}
