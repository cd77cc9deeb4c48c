// The list of turns and calls.

import { useMemo } from "preact/hooks";
import { count, lasted, money, OutcomeIcon, short, slug, Empty } from "../parts/bits.tsx";
import { Virtual } from "../parts/virtual.tsx";
import { isProblem, type Row } from "../model.ts";

const ROW = 30;
const LANE = 10;

export function Timeline({ rows, call, choose, filtered }: {
  rows: Row[]; call: number; choose: (n: number) => void; filtered: boolean;
}) {
  const active = useMemo(() => rows.findIndex((r) => r.kind === "call" && r.call.n === call), [rows, call]);
  // Lanes belong to a turn: its concurrent calls stand beside each other.
  const lanes = useMemo(() => {
    const most = new Map<number, number>();
    for (const row of rows)
      if (row.kind === "call") most.set(row.call.turn, Math.max(most.get(row.call.turn) ?? 0, row.call.lane));
    return most;
  }, [rows]);
  const calls = useMemo(() => rows.filter((r) => r.kind === "call").length, [rows]);
  const numbers = useMemo(() => {
    let n = 0;
    return rows.map((r) => (r.kind === "call" ? ++n : n));
  }, [rows]);
  return (
    <Virtual class="timeline" id="timeline" count={rows.length} rowHeight={ROW} active={active} label="Calls"
      activeId={active >= 0 ? `call-${call}` : undefined}
      empty={<Empty>{filtered ? "No call passes the filter." : "No calls yet."}</Empty>}
      render={(i) => {
        const row = rows[i]!;
        if (row.kind === "turn") return <TurnItem key={`t${row.turn.n}`} row={row} />;
        if (row.kind === "user")
          return <div key={`u${row.turn}`} class="row user" role="presentation"><b>User</b><span class="words">{row.text}</span></div>;
        return <CallItem key={row.call.n} row={row} chosen={i === active} choose={choose}
          lanes={lanes.get(row.call.turn) ?? 0} place={numbers[i]!} of={calls} />;
      }} />
  );
}

function TurnItem({ row }: { row: Row & { kind: "turn" } }) {
  const { turn } = row;
  const tokens = turn.tokens[0] + turn.tokens[1];
  return (
    <div class="row turn" role="presentation">
      <b>Turn {turn.n}</b>
      <span class="words">{turn.text}</span>
      {tokens > 0 && <span class="figure" title={`${turn.tokens[0]} tokens in, ${turn.tokens[1]} out`}>{short(tokens)} tok</span>}
      {turn.cost !== null && <span class="figure">{money(turn.cost)}</span>}
    </div>
  );
}

function CallItem({ row, chosen, choose, lanes, place, of }: {
  row: Row & { kind: "call" }; chosen: boolean; choose: (n: number) => void; lanes: number; place: number; of: number;
}) {
  const { call, depth } = row;
  const told = [
    `Call ${call.n}, ${call.tool} ${call.summary}, ${call.outcome}`,
    lanes ? `concurrent, lane ${call.lane + 1}` : "",
    call.nestedIn === null ? "" : `nested in call ${call.nestedIn}`,
    call.retries ? count(call.retries, "retry", "retries") : "",
    call.files ? `${count(call.files, "file")} changed` : "",
    call.slices.length ? `changed ${call.slices.join(", ")}` : "",
    call.error,
  ].filter(Boolean).join(", ");
  return (
    <div id={`call-${call.n}`} role="option" aria-selected={chosen} aria-label={told} aria-posinset={place} aria-setsize={of}
      class={`row call is-${slug(call.outcome)} ${chosen ? "chosen" : ""}`} onClick={() => choose(call.n)}>
      <span class="number">{call.n}</span>
      <span class="lanes" style={{ width: `${(lanes + 1) * LANE + depth * 14 + 10}px` }} aria-hidden="true">
        {Array.from({ length: lanes + 1 }, (_, lane) => (
          <i key={lane} class="lane" style={{ left: `${lane * LANE + 8}px` }} />
        ))}
        {depth > 0 && <i class="elbow" style={{ left: `${call.lane * LANE + 8}px`, width: `${depth * 14 - 4}px` }} />}
        <span class="spot" style={{ left: `${call.lane * LANE + depth * 14}px` }}><OutcomeIcon outcome={call.outcome} /></span>
      </span>
      <span class="tool">{call.tool}</span>
      <span class="words" title={call.summary}>{call.summary}</span>
      {call.retries > 0 && <span class="pill" title={`${call.attempts} attempts`}>↻ {call.retries}</span>}
      {call.conflicts.length > 0 && <span class="pill warn" title={call.conflicts.join("\n")}>conflict</span>}
      {(isProblem(call) || ["undone", "undo", "dry run"].includes(call.outcome))
        && <span class="word">{call.outcome}</span>}
      {call.files > 0 && <span class="figure" title={`${count(call.files, "file")} changed`}>{call.files}&thinsp;Δ</span>}
      {call.slices.length > 0 && <span class="figure" title={`Changed in the session: ${call.slices.join(", ")}`}>state</span>}
      <span class="figure time">{lasted(call.duration)}</span>
    </div>
  );
}
