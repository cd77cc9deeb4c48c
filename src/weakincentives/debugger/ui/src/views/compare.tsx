// Two worlds side by side: two calls, two branches or two runs.

import { useState } from "preact/hooks";
import { useData } from "../data.ts";
import { jsonLines, partAt, serialAt, type Point } from "../model.ts";
import { count, Empty, lasted, money, Outcome, Problem, Section, short } from "../parts/bits.tsx";
import { SideBySide } from "../parts/diff.tsx";
import { at, source } from "../source.ts";
import type { CallView, Comparison, FileView, RunSummary, RunView, Workspace } from "../types.ts";
import { go } from "../url.ts";

/** "RUN/N", "RUN/last" or "RUN/N/before". */
function parseSide(text: string): { run: string; call: string; before: boolean } {
  const [run = "", call = "last", before] = text.split("/");
  return { run, call, before: before === "before" };
}

/** What a run is best compared with: the run that it was forked from, another try of the task, or its own other end. */
function usefulSide({ run, calls }: RunView, point: Point, runs: RunSummary[]): string {
  const [parent] = run.forkedFrom?.split("/") ?? [];
  const twin = runs.find((r) => r.id === parent) ?? runs.filter((r) => r.id !== run.id && run.title && r.title === run.title)
    .sort((a, b) => b.began - a.began)[0];
  if (twin) return `${twin.id}/last`;
  return point.call === calls.at(-1)?.n ? `${run.id}/${calls[0]?.n ?? 0}/before` : `${run.id}/last`;
}

export function ComparePanel({ view, point, other, workspace, version }: {
  view: RunView; point: Point; other: string; workspace: Workspace; version: number;
}) {
  const side = parseSide(other || usefulSide(view, point, workspace.runs));
  const theirs = useData<RunView>(side.run === view.run.id ? null : at.run(side.run), `${version} ${workspace.runs.find((r) => r.id === side.run)?.calls}`);
  const b = side.run === view.run.id ? view : theirs.data;
  const last = b?.calls.at(-1)?.n ?? 0;
  const pointB: Point = { call: side.call === "last" ? last : Number(side.call), before: side.before };
  const set = (change: Partial<typeof side>) => {
    const next = { ...side, ...change };
    go({ with: `${next.run}/${next.call}${next.before ? "/before" : ""}` }, "replace");
  };
  return (
    <article aria-label="Compare">
      <header class="call-head">
        <h2>Compare</h2>
        <div class="sides">
          <div class="side-a">
            <span class="badge">A</span> {name(view.run)}, {point.before ? "before" : "after"} call {point.call}
            <span class="muted">Move along the timeline to change it.</span>
          </div>
          <div class="side-b">
            <span class="badge">B</span>
            <RunChoice workspace={workspace} value={side.run} choose={(run) => set({ run, call: "last", before: false })} />
            <label>{" "}<select aria-label="Before or after the call" value={side.before ? "before" : "after"}
              onChange={(e) => set({ before: e.currentTarget.value === "before" })}>
              <option value="before">before</option><option value="after">after</option>
            </select></label>
            <label>call <input type="number" aria-label="Call of B" min={1} max={last} value={pointB.call}
              onChange={(e) => set({ call: e.currentTarget.value || "last" })} /></label>
            <button type="button" class="small" aria-pressed={side.call === "last"} onClick={() => set({ call: "last", before: false })}>last call</button>
          </div>
        </div>
      </header>
      {theirs.error && <Problem text={theirs.error} />}
      {b && (!point.call || !pointB.call) && <Empty>{point.call ? "B" : "A"} has no call yet.</Empty>}
      {b && point.call > 0 && pointB.call > 0 && <Worlds a={view} b={b} pointA={point} pointB={pointB} version={version} />}
    </article>
  );
}

const name = (run: RunSummary) => `${run.mark || run.id}${run.branch ? ` (${run.branch})` : ""}`;

function RunChoice({ workspace, value, choose }: { workspace: Workspace; value: string; choose: (run: string) => void }) {
  const runs = [...workspace.runs].sort((a, b) => b.began - a.began);
  return (
    <select aria-label="Run of B" value={value} onChange={(e) => choose(e.currentTarget.value)}>
      {runs.map((r) => <option key={r.id} value={r.id}>{name(r)}: {r.title.slice(0, 60)}</option>)}
    </select>
  );
}

function Worlds({ a, b, pointA, pointB, version }: { a: RunView; b: RunView; pointA: Point; pointB: Point; version: number }) {
  const path = at.compare([a.run.id, pointA], [b.run.id, pointB]);
  const { data, error, loading } = useData<Comparison>(path, `${version} ${b.calls.length}`);
  const [open, setOpen] = useState("");
  return (
    <>
      <Figures a={a} b={b} pointA={pointA} pointB={pointB} />
      {a !== b && <Divergence a={a} b={b} />}
      {error && <Problem text={error} />}
      <Section title="Files that differ" aside={data ? data.files.length : undefined}>
        {loading && <Empty>Comparing…</Empty>}
        {data?.files.length === 0 && <Empty>The files are the same.</Empty>}
        <ul class="differing">
          {data?.files.map(([file, kind]) => (
            <li key={file}>
              <button type="button" aria-expanded={open === file} onClick={() => setOpen(open === file ? "" : file)}>
                <span class="path">{file}</span><span class="muted">{kind === "only a" ? "only in A" : kind === "only b" ? "only in B" : "differs"}</span>
              </button>
              {open === file && <FilePair a={[a, pointA]} b={[b, pointB]} path={file} />}
            </li>
          ))}
        </ul>
        {data?.truncated && <p class="note">Too many differences: the list is cut.</p>}
      </Section>
      <Section title="Slices that differ" aside={data ? data.slices.length : undefined}>
        {data?.slices.length === 0 && <Empty>The session is the same.</Empty>}
        {data?.slices.map((slice) => (
          <details class="change" key={slice.key} open>
            <summary><span class="path">{slice.name}</span></summary>
            <SideBySide a={text(slice.a)} b={text(slice.b)} label={slice.name} path=".json" />
          </details>
        ))}
      </Section>
    </>
  );
}

const text = (values: unknown[]) => values.map((v) => jsonLines(v).join("\n")).join("\n");

function FilePair({ a, b, path }: { a: [RunView, Point]; b: [RunView, Point]; path: string }) {
  const left = useData<FileView>(at.file(a[0].run.id, serialAt(...a), path));
  const right = useData<FileView>(at.file(b[0].run.id, serialAt(...b), path));
  const error = left.error || right.error;
  if (error && source.live) return <Problem text={error} />;
  if (left.loading || right.loading) return <Empty>Loading…</Empty>;
  const note = left.data?.note || right.data?.note;
  return (
    <>
      {note && <p class="note">{note}</p>}
      <SideBySide a={left.data?.text ?? ""} b={right.data?.text ?? ""} label={path} />
    </>
  );
}

function Figures({ a, b, pointA, pointB }: { a: RunView; b: RunView; pointA: Point; pointB: Point }) {
  const rowA = a.calls.find((c) => c.n === pointA.call);
  const rowB = b.calls.find((c) => c.n === pointB.call);
  const left = useData<CallView>(rowA ? at.call(a.run.id, rowA.n) : null);
  const right = useData<CallView>(rowB ? at.call(b.run.id, rowB.n) : null);
  const line = (title: string, x: preact.ComponentChildren, y: preact.ComponentChildren) => (
    <tr><th scope="row">{title}</th><td>{x}</td><td>{y}</td></tr>
  );
  return (
    <table class="figures">
      <thead><tr><td /><th scope="col">A</th><th scope="col">B</th></tr></thead>
      <tbody>
        {a !== b && line("Run", figures(a.run), figures(b.run))}
        {line("Call", rowA ? `#${rowA.n} ${rowA.tool} ${rowA.summary}` : "none", rowB ? `#${rowB.n} ${rowB.tool} ${rowB.summary}` : "none")}
        {line("Outcome", rowA && <><Outcome outcome={rowA.outcome} /> {lasted(rowA.duration)}</>, rowB && <><Outcome outcome={rowB.outcome} /> {lasted(rowB.duration)}</>)}
        {line("Result", <span class="clamp">{left.data?.result}</span>, <span class="clamp">{right.data?.result}</span>)}
      </tbody>
    </table>
  );
}

const figures = ({ calls, tokens, cost, state }: RunSummary) =>
  [count(calls, "call"), `${short(tokens)} tokens`, money(cost), state].filter(Boolean).join(", ");

const SHOWN = 12;

/** Where two runs part, and what each did then. */
function Divergence({ a, b }: { a: RunView; b: RunView }) {
  const first = partAt(a.calls, b.calls);
  const side = (view: RunView) => view.calls.filter((c) => c.n >= first).slice(0, SHOWN).map((c) => (
    <li key={c.n}><button type="button" class="link" onClick={() => go({ run: view.run.id, call: c.n, panel: "call", before: false })}>#{c.n} {c.tool}</button> {c.summary} <Outcome outcome={c.outcome} /></li>
  ));
  return (
    <Section title="Where they part">
      <p class="muted">{first > 1 ? `Calls 1 to ${first - 1} are the same.` : "They differ from the first call on."}</p>
      <div class="sides"><div><span class="badge">A</span><ol class="plain">{side(a)}</ol></div><div><span class="badge">B</span><ol class="plain">{side(b)}</ol></div></div>
    </Section>
  );
}
