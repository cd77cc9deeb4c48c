// One call: what the model said and asked, what was decided, what happened, what changed.

import { useState } from "preact/hooks";
import { useData } from "../data.ts";
import { diffLines, jsonLines, parsePatch, textAt } from "../model.ts";
import { clock, count, Empty, lasted, Outcome, Problem, Section, Tag } from "../parts/bits.tsx";
import { DiffLines, SideBySide } from "../parts/diff.tsx";
import { Json } from "../parts/json.tsx";
import { at } from "../source.ts";
import type { CallRow, CallView, FileDiff, SliceDiff, Versions } from "../types.ts";
import { go } from "../url.ts";
import { CallActions, type Action } from "./actions.tsx";

export function CallPanel({ run, row, version, writable, wanted, want }: {
  run: string; row: CallRow; version: number; writable: boolean; wanted: Action | ""; want: (action: Action | "") => void;
}) {
  const { data, error } = useData<CallView>(at.call(run, row.n), version);
  const call = data?.n === row.n ? data : undefined;
  return (
    <article aria-label={`Call ${row.n}`} aria-busy={!call && !error}>
      <header class="call-head">
        <h2><span class="muted">#{row.n}</span> {row.tool} <span class="summary">{row.summary}</span></h2>
        <p class="facts">
          <Outcome outcome={row.outcome} />
          <span>{clock(row.time)}</span>
          <span>{lasted(row.duration)}</span>
          {row.turn > 0 && <span>turn {row.turn}</span>}
          {row.attempts > 1 && <span>{count(row.attempts, "attempt")}</span>}
          {row.retries > 0 && <span>{count(row.retries, "retry", "retries")}</span>}
          {row.nestedIn !== null && (
            <span>nested in <button type="button" class="link" onClick={() => go({ call: row.nestedIn })}>call {row.nestedIn}</button></span>
          )}
          {call?.edited && <Tag>arguments edited by a person</Tag>}
        </p>
        {writable && <CallActions run={run} row={row} call={call} wanted={wanted} want={want} />}
      </header>
      {error && <Problem text={error} />}
      {call && <Details run={run} call={call} />}
    </article>
  );
}

/** What the call changed comes first; or, if it changed nothing, why. */
function Details({ run, call }: { run: string; call: CallView }) {
  const wrong = Object.keys(call.problems).length;
  return (
    <>
      <Rollback call={call} />
      {call.changes.length > 0 && (
        <Section title="Files" aside={count(call.changes.length, "file")}>
          {call.changes.map((change) => <FileChange key={change.path} run={run} change={change} call={call} />)}
        </Section>
      )}
      {call.state.length > 0 && (
        <Section title="Session" aside={count(call.state.length, "slice")}>
          {call.state.map((slice) => <SliceChange key={slice.key} slice={slice} />)}
        </Section>
      )}
      {call.text && <Section title="The model said"><pre class="prose">{call.text}</pre></Section>}
      <Section title="Arguments" aside={wrong ? count(wrong, "validation error") : undefined}>
        <Json value={call.arguments} problems={call.problems} />
      </Section>
      {call.policies.length > 0 && (
        <Section title="Policies">
          <ul class="policies">
            {call.policies.map((p, i) => (
              <li key={i} class={`is-${p.answer.replace(" ", "-")}`}>
                <span class="answer">{p.answer === "allowed" ? "✓ " : p.answer === "denied" ? "⊘ " : "– "}{p.answer}</span>
                <code>{p.name}</code>
                {p.note && <span>{p.note}</span>}
              </li>
            ))}
          </ul>
        </Section>
      )}
      <Section title="Result, as the model saw it">
        {call.result ? <pre class="text-block" tabIndex={0}>{call.result}</pre> : <Empty>Empty.</Empty>}
      </Section>
      {call.changes.length + call.state.length === 0 && (
        <Empty>{call.outcome === "rolled back" ? "Nothing changed: the call was rolled back." : "No file and no slice changed."}</Empty>
      )}
    </>
  );
}

function Rollback({ call }: { call: CallView }) {
  const { failure, undone, notUndone, notes, conflicts } = call;
  if (!failure && !undone.length && !notUndone.length && !notes.length && !conflicts.length) return null;
  const list = (title: string, items: string[], kind: string) => items.length > 0 && (
    <div class={kind}><h4>{title}</h4><ul>{items.map((text, i) => <li key={i}>{text}</li>)}</ul></div>
  );
  return (
    <Section title={failure ? "What went wrong" : "Notes"}>
      {failure && (
        <div class="failure">
          <p><code>{failure.code}</code> {Object.keys(call.problems).length ? "The arguments are not valid: see below." : failure.message}</p>
          <p class="muted">{failure.recoverable ? "The model may try again." : "Trying again will not help."}</p>
          {list("Suggestions", failure.suggestions, "")}
        </div>
      )}
      {list("Undone", undone, "undone-list")}
      {list("Not undone", notUndone, "not-undone")}
      {list("Conflicts with concurrent calls", conflicts, "")}
      {list("Notes", notes, "")}
    </Section>
  );
}

const SIGN = { added: "A", changed: "M", deleted: "D" } as const;

/** A patch as lines; `open` offers more when the file can be looked at. */
export function PatchView({ change, children }: { change: FileDiff; children?: preact.ComponentChildren }) {
  return (
    <details class="change" open>
      <summary>
        <span class={`kind is-${change.kind}`} title={change.kind}>{SIGN[change.kind]}<span class="hidden"> {change.kind} </span></span>
        <span class="path">{change.origin && <span class="muted">{change.origin} → </span>}{change.path}</span>
        <span class="plus">+{change.added}</span> <span class="minus">−{change.removed}</span>
      </summary>
      {children}
      {change.note && <p class="note">{change.note}</p>}
      {change.binary ? <Empty>Not text.</Empty> : change.patch && <DiffLines lines={parsePatch(change.patch)} label={`Changes in ${change.path}`} path={change.path} />}
    </details>
  );
}

function FileChange({ run, change, call }: { run: string; change: FileDiff; call: CallView }) {
  const [beside, setBeside] = useState(false);
  const offers = (
    <p class="offers">
      {change.kind !== "deleted" && (
        <button type="button" class="small" onClick={() => go({ panel: "files", path: change.path, line: 0, before: false })}>Open file</button>
      )}
      {!change.binary && (
        <button type="button" class="small" aria-pressed={beside} onClick={() => setBeside(!beside)}>Side by side</button>
      )}
    </p>
  );
  if (!beside) return <PatchView change={change}>{offers}</PatchView>;
  return (
    <PatchView change={{ ...change, patch: "" }}>
      {offers}
      <Beside run={run} path={change.path} from={call.before} to={call.after} />
    </PatchView>
  );
}

function Beside({ run, path, from, to }: { run: string; path: string; from: number; to: number }) {
  const { data, error } = useData<Versions>(at.versions(run, path));
  if (error) return <Problem text={error} />;
  return data ? <SideBySide a={textAt(data, from) ?? ""} b={textAt(data, to) ?? ""} label={path} /> : null;
}

function SliceChange({ slice }: { slice: SliceDiff }) {
  const lines = slice.log
    ? slice.after.flatMap((v) => jsonLines(v)).map((text, i) => ({ kind: "+" as const, text, a: 0, b: i + 1 }))
    : diffLines(slice.before.flatMap((v) => jsonLines(v)), slice.after.flatMap((v) => jsonLines(v)));
  return (
    <details class="change" open>
      <summary>
        <span class="path">{slice.name}</span>
        {slice.log && <span class="muted">{count(slice.after.length, "value")} appended</span>}
      </summary>
      <p class="offers">
        <button type="button" class="small" onClick={() => go({ panel: "state", slice: slice.key, line: 0, before: false })}>Open slice</button>
      </p>
      <DiffLines lines={lines} label={`Changes in ${slice.name}`} path=".json" />
    </details>
  );
}
