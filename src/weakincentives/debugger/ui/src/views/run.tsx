// One run: the scrubber, the timeline, and a panel for the chosen call or the world at it.

import { useEffect, useLayoutEffect, useMemo, useState } from "preact/hooks";
import { filtered, isProblem, rows, type Filter, type Point } from "../model.ts";
import { count, day, Empty, lasted, money, short, Tag } from "../parts/bits.tsx";
import { useKeys, type Shortcut } from "../keys.ts";
import type { CallRow, RunView, Workspace } from "../types.ts";
import { go, link, PANELS, type Panel, type Place } from "../url.ts";
import type { Action } from "./actions.tsx";
import { CallPanel } from "./call.tsx";
import { ComparePanel } from "./compare.tsx";
import { FilesPanel } from "./files.tsx";
import { RunState } from "./home.tsx";
import { PromptPanel } from "./prompt.tsx";
import { SearchPanel } from "./search.tsx";
import { StatePanel } from "./state.tsx";
import { Strip, ZOOMS, type Scale } from "./strip.tsx";
import { Timeline } from "./timeline.tsx";

const NAMES: Record<Panel, string> = {
  call: "Call", files: "Files", state: "Session", prompt: "Prompt", search: "Search", compare: "Compare",
};

export function RunPage({ view, place, workspace, version, writable }: {
  view: RunView; place: Place; workspace: Workspace; version: number; writable: boolean;
}) {
  const [filter, setFilter] = useState<Filter>({ tool: "", outcome: "", path: "" });
  const [zoom, setZoom] = useState(view.calls.length > 400 ? 3 : 0);
  const [scale, setScale] = useState<Scale>("calls");
  const [wanted, want] = useState<Action | "">("");
  const calls = useMemo(() => new Map(view.calls.map((c) => [c.n, c])), [view.calls]);
  const shown = useMemo(() => filtered(view, filter), [view, filter]);
  const list = useMemo(() => rows(view, shown), [view, shown]);
  const order = useMemo(() => list.flatMap((r) => (r.kind === "call" ? [r.call.n] : [])), [list]);

  // Without a call in the address, the page follows the run.
  const call = place.call !== null && calls.has(place.call) ? place.call : view.calls.at(-1)?.n ?? 0;
  const row = calls.get(call);
  const point: Point = { call, before: place.before };

  const move = (by: number) => {
    const now = order.indexOf(call);
    const next = now < 0 ? order.find((n) => n > call) ?? order.at(-1) : order[Math.min(order.length - 1, Math.max(0, now + by))];
    if (next !== undefined) go({ call: next }, "replace");
  };
  const problem = (by: 1 | -1) => {
    const found = view.calls.filter(isProblem).map((c) => c.n);
    const next = by > 0 ? found.find((n) => n > call) : found.findLast((n) => n < call);
    if (next !== undefined) go({ call: next }, "replace");
  };
  // It is about this call, also when the run goes on meanwhile.
  const act = (action: Action | "") => {
    if (action) go({ panel: "call", call }, "replace");
    want(action);
  };
  useLayoutEffect(() => want(""), [call]); // not later: the next key may be an action
  const visit = (which: string) => document.querySelector<HTMLButtonElement>(`[data-visit="${which}"]:not(:disabled)`)?.click();
  useKeys([
    { keys: ["j", "ArrowDown"], does: "Next call", run: () => move(1) },
    { keys: ["k", "ArrowUp"], does: "Previous call", run: () => move(-1) },
    { keys: ["PageDown"], does: "20 calls on", run: () => move(20) },
    { keys: ["PageUp"], does: "20 calls back", run: () => move(-20) },
    { keys: ["g", "Home"], does: "First call", run: () => move(-order.length) },
    { keys: ["G", "End"], does: "Last call; follow a live run", run: () => go({ call: null, before: false }, "replace") },
    { keys: ["n"], does: "Next problem: rolled back, denied, refused or suspended", run: () => problem(1) },
    { keys: ["p"], does: "Previous problem", run: () => problem(-1) },
    { keys: ["]"], does: "Next change of the open file", run: () => visit("next") },
    { keys: ["["], does: "Previous change of the open file", run: () => visit("previous") },
    { keys: ["b"], does: "State before or after the call", run: () => go({ before: !place.before }, "replace") },
    ...PANELS.map((panel, i): Shortcut => ({ keys: [String(i + 1)], does: `${NAMES[panel]} panel`, run: () => go({ panel }) })),
    { keys: ["/"], does: "Search", run: () => focusSearch() },
    { keys: ["f"], does: "Filter the calls", run: () => document.getElementById("filter-path")?.focus() },
    { keys: ["+", "="], does: "Zoom in", run: () => setZoom(Math.min(ZOOMS.length - 1, zoom + 1)) },
    { keys: ["-"], does: "Zoom out", run: () => setZoom(Math.max(0, zoom - 1)) },
    { keys: ["s"], does: "Scale by calls or by time", run: () => setScale(scale === "calls" ? "time" : "calls") },
    { keys: ["c"], does: "Compare another point with this one", run: () => go({ panel: "compare", with: `${view.run.id}/${call}` }) },
    ...(writable ? [
      { keys: ["u"], does: "Undo this call", run: () => act("undo") },
      { keys: ["r"], does: "Rewind to this call", run: () => act("rewind") },
      { keys: ["o"], does: "Fork at this call", run: () => act("fork") },
      { keys: ["e"], does: "Edit this call and rerun", run: () => act("rerun") },
    ] : []),
  ], 1);

  // What had the focus may be gone with its panel.
  useEffect(() => {
    if (document.activeElement === document.body) document.getElementById("panel")?.focus({ preventScroll: true });
  }, [place.panel]);

  return (
    <main class="run" id="main">
      <RunHead view={view} />
      <Strip calls={view.calls} point={point} zoom={zoom} setZoom={setZoom} scale={scale} setScale={setScale}
        scrub={(n) => go({ call: n }, "replace")} setBefore={(before) => go({ before }, "replace")} />
      <div class="run-body">
        <section class="side" aria-label="Timeline">
          <Filters view={view} filter={filter} set={setFilter} shown={order.length} />
          <Timeline rows={list} call={call} choose={(n) => go({ call: n, before: false })} filtered={shown !== null} />
        </section>
        <section class="panel" aria-label="Details">
          <Tabs panel={place.panel} />
          <div class={`panel-body is-${place.panel}`} role="tabpanel" id="panel" aria-labelledby={`tab-${place.panel}`} tabIndex={-1}>
            {place.panel === "call" && (row
              ? <CallPanel key={row.n} run={view.run.id} row={row} version={version} writable={writable} wanted={wanted} want={act} />
              : <Empty>No call yet.</Empty>)}
            {place.panel === "files" && <FilesPanel view={view} place={place} point={point} calls={calls} version={version} />}
            {place.panel === "state" && <StatePanel view={view} place={place} point={point} calls={calls} version={version} />}
            {place.panel === "prompt" && <PromptPanel view={view} call={row} version={version} />}
            {place.panel === "search" && <SearchPanel view={view} query={place.q} calls={calls} shown={shown} version={version} />}
            {place.panel === "compare" && <ComparePanel view={view} point={point} other={place.with} workspace={workspace} version={version} />}
          </div>
        </section>
      </div>
    </main>
  );
}

function focusSearch(): void {
  go({ panel: "search" });
  requestAnimationFrame(() => document.getElementById("search")?.focus()); // once it is drawn
}

function RunHead({ view }: { view: RunView }) {
  const { run } = view;
  const [parent, at] = run.forkedFrom?.split("/") ?? [];
  return (
    <header class="run-head">
      <h1 title={run.title}>{run.title || "(no task)"}</h1>
      <p class="facts">
        <RunState run={run} />
        <code>{run.mark}</code>
        <span>{run.model}</span>
        <span>{day(run.began)}</span>
        <span>{lasted(Math.max(0, run.saved - run.began))}</span>
        <span>{count(run.turns, "turn")}</span>
        <span>{count(run.calls, "call")}</span>
        <span>{short(run.tokens)} tokens</span>
        {run.cost !== null && <span>{money(run.cost)}</span>}
        {run.branch && <Tag>branch {run.branch}</Tag>}
        {parent && <a href={link({ run: parent, call: Number(at) })}>forked at call {at}</a>}
        {run.dry && <Tag>dry run</Tag>}
        {run.damage && <Tag kind="bad">damaged: {run.damage}</Tag>}
      </p>
    </header>
  );
}

function Filters({ view, filter, set, shown }: {
  view: RunView; filter: Filter; set: (filter: Filter) => void; shown: number;
}) {
  const values = (get: (c: CallRow) => string) => [...new Set(view.calls.map(get))].sort();
  const tools = useMemo(() => values((c) => c.tool), [view.calls]);
  const outcomes = useMemo(() => values((c) => c.outcome), [view.calls]);
  const choice = (label: string, key: "tool" | "outcome", all: string[]) => (
    <select aria-label={label} value={filter[key]} onChange={(e) => set({ ...filter, [key]: e.currentTarget.value })}>
      <option value="">{label}: all</option>
      {all.map((v) => <option key={v} value={v}>{v}</option>)}
    </select>
  );
  const on = filter.tool || filter.outcome || filter.path;
  return (
    <div class="filters" role="group" aria-label="Filter the calls">
      <input id="filter-path" type="search" aria-label="Path" placeholder="Path" value={filter.path}
        onInput={(e) => set({ ...filter, path: e.currentTarget.value })} />
      {choice("Tool", "tool", tools)}
      {choice("Outcome", "outcome", outcomes)}
      <button type="button" class="small" disabled={!on} onClick={() => set({ tool: "", outcome: "", path: "" })}
        aria-label={`Clear the filter, ${count(shown, "call")} shown`}>{on ? `${shown} ✕` : "all"}</button>
    </div>
  );
}

function Tabs({ panel }: { panel: Panel }) {
  const onKey = (event: KeyboardEvent) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    event.stopPropagation();
    const next = PANELS[(PANELS.indexOf(panel) + by + PANELS.length) % PANELS.length]!;
    go({ panel: next });
    document.getElementById(`tab-${next}`)?.focus();
  };
  return (
    <div class="tabs" role="tablist" aria-label="Panels" onKeyDown={onKey}>
      {PANELS.map((name, i) => (
        <button key={name} type="button" role="tab" id={`tab-${name}`} aria-selected={name === panel} aria-controls="panel"
          tabIndex={name === panel ? 0 : -1} title={`${NAMES[name]} (${i + 1})`} onClick={() => go({ panel: name })}>{NAMES[name]}</button>
      ))}
    </div>
  );
}
