// Who wrote this: the call, and the model's text that led to it.

import { Outcome } from "../parts/bits.tsx";
import type { Line } from "../parts/lines.tsx";
import { useData } from "../data.ts";
import { at } from "../source.ts";
import type { CallRow, CallView, RunView } from "../types.ts";
import { go } from "../url.ts";

export function BlameCard({ run, what, line, calls, view }: {
  run: string; what: string; line: Line; calls: Map<number, CallRow>; view: RunView;
}) {
  const row = line.call === null ? undefined : calls.get(line.call);
  const full = useData<CallView>(row ? at.call(run, row.n) : null);
  const text = full.data?.text ?? view.turns.find((t) => t.n === row?.turn)?.text ?? "";
  return (
    <aside class="blame" aria-label="Blame" aria-live="polite">
      {row ? (
        <>
          <p>
            {what} was written by <button type="button" class="link strong" onClick={() => go({ call: row.n, before: false, panel: "call" })}>
              call {row.n}, {row.tool}</button> <Outcome outcome={row.outcome} />
          </p>
          <p class="muted">{row.summary}</p>
          {text ? <blockquote class="said">{text}</blockquote> : <p class="muted">The model said nothing before this call.</p>}
        </>
      ) : <p>{what} was written {line.author === "before the run" ? "before the run" : `by ${line.author}`}.</p>}
    </aside>
  );
}
