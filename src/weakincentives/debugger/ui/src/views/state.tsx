// The session at a point: any slice, the plan, and for any value the call that wrote it.

import { useMemo } from "preact/hooks";
import { useData } from "../data.ts";
import { sliceAt, type Point, type Traced } from "../model.ts";
import { count, Empty, Problem, Tag } from "../parts/bits.tsx";
import { tracedLines } from "../parts/json.tsx";
import { Lines } from "../parts/lines.tsx";
import { at } from "../source.ts";
import type { CallRow, RunView, SliceHistory, SliceRow } from "../types.ts";
import { go, type Place } from "../url.ts";
import { BlameCard } from "./blame.tsx";

const isPlan = (slice: SliceRow) => /(^|\.)Plan$/.test(slice.name);

export function StatePanel({ view, place, point, calls, version }: {
  view: RunView; place: Place; point: Point; calls: Map<number, CallRow>; version: number;
}) {
  const slices = useMemo(() => [...view.slices].sort((a, b) => Number(isPlan(b)) - Number(isPlan(a)) || b.versions - a.versions || (a.name < b.name ? -1 : 1)), [view.slices]);
  const here = calls.get(point.call);
  const open = slices.find((s) => s.key === place.slice) ?? slices.find((s) => here?.slices.includes(s.key)) ?? slices[0];
  if (!open) return <Empty>This run has no session slices.</Empty>;
  return (
    <div class="world">
      <nav class="world-side" aria-label="Slices">
        <ul class="slices">
          {slices.map((slice) => {
            const now = !point.before && (here?.slices.includes(slice.key) || here?.slices.includes(slice.name));
            return (
              <li key={slice.key}>
                <button type="button" aria-current={slice.key === open.key} onClick={() => go({ panel: "state", slice: slice.key, line: 0 })}>
                  <span class="name">{slice.name}</span>
                  {now ? <span class="mark">this call</span> : <span class="muted">{count(slice.versions, "version")}</span>}
                </button>
              </li>
            );
          })}
        </ul>
      </nav>
      <div class="world-main">
        <SliceView key={open.key} view={view} slice={open} place={place} point={point} calls={calls} version={version} />
      </div>
    </div>
  );
}

function SliceView({ view, slice, place, point, calls, version }: {
  view: RunView; slice: SliceRow; place: Place; point: Point; calls: Map<number, CallRow>; version: number;
}) {
  const history = useData<SliceHistory>(at.slices(view.run.id, slice.key), version);
  const values = useMemo(() => (history.data ? sliceAt(history.data, point) : []), [history.data, point.call, point.before]);
  const lines = useMemo(() => tracedLines(values), [values]);
  const chosen = lines[place.line - 1];
  const plan = isPlan(slice) ? values.at(-1) : undefined;
  return (
    <>
      <header class="file-head">
        <h2>{slice.name} {slice.log && <Tag>log</Tag>}</h2>
        <p class="facts"><span>{point.before ? "before" : "after"} call {point.call}</span><span>{count(values.length, "value")}</span></p>
      </header>
      {history.error && <Problem text={history.error} />}
      {plan && <PlanView plan={plan} />}
      {history.data && values.length === 0 && <Empty>Nothing in it at this point.</Empty>}
      {lines.length > 0 && (
        <Lines path=".json" lines={lines} calls={calls} chosen={place.line} now={point.before ? -1 : point.call} label={`${slice.name}, each value with the call that wrote it`}
          choose={(line) => go({ slice: slice.key, line }, "replace")} open={(call) => go({ call, before: false, panel: "call" })} />
      )}
      {chosen && <BlameCard run={view.run.id} what="This value" line={chosen} calls={calls} view={view} />}
    </>
  );
}

const MARKS: Record<string, string> = { done: "✓", "in-progress": "›", blocked: "!", pending: "" };

function PlanView({ plan }: { plan: Traced }) {
  const value = plan.value as { objective?: unknown; steps?: unknown };
  const steps = Array.isArray(value?.steps) ? value.steps : [];
  if (!steps.length) return null;
  return (
    <div class="plan">
      {typeof value.objective === "string" && value.objective && <p><strong>{value.objective}</strong></p>}
      <ol>
        {steps.map((step: unknown, i) => {
          const { title, status, note } = (typeof step === "object" && step ? step : { title: step }) as Record<string, unknown>;
          const by = plan.fields?.steps?.items?.[i]?.call;
          return (
            <li key={i} class={`step is-${String(status ?? "pending")}`}>
              <span class="box" aria-hidden="true">{MARKS[String(status)] ?? ""}</span>
              <span>{String(title ?? "")}{note ? <span class="muted"> ({String(note)})</span> : null}</span>
              <span class="muted">{String(status ?? "pending")}</span>
              {by ? <button type="button" class="link" onClick={() => go({ call: by, before: false, panel: "call" })}>#{by}</button> : null}
            </li>
          );
        })}
      </ol>
    </div>
  );
}
