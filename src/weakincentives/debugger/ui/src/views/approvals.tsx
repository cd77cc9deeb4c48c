// Calls of live runs that wait for a person.

import { useState } from "preact/hooks";
import { say } from "../keys.ts";
import { clock, Empty, Problem, Tag } from "../parts/bits.tsx";
import { Dialog } from "../parts/dialog.tsx";
import { source } from "../source.ts";
import type { Approval, RunSummary } from "../types.ts";
import { link } from "../url.ts";
import { ArgumentEditor } from "./actions.tsx";

export function Approvals({ approvals, runs, close }: { approvals: Approval[]; runs: RunSummary[]; close: () => void }) {
  return (
    <Dialog title="Approvals" close={close}>
      {approvals.length === 0 && <Empty>Nothing waits for an approval.</Empty>}
      {approvals.map((a) => <Request key={a.id} approval={a} run={runs.find((r) => r.id === a.run)} />)}
    </Dialog>
  );
}

function Request({ approval, run }: { approval: Approval; run: RunSummary | undefined }) {
  const [reason, setReason] = useState("");
  const [editing, setEditing] = useState(false);
  const [args, setArgs] = useState<unknown>(approval.arguments);
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState("");
  const edited = editing && JSON.stringify(args) !== JSON.stringify(approval.arguments);
  const answer = (approved: boolean) => {
    setBusy(true);
    setError("");
    const body = {
      approved, digest: approval.digest, ...(reason ? { reason } : {}), ...(approved && edited ? { arguments: args } : {}),
    };
    source.post(`approvals/${encodeURIComponent(approval.id)}`, body).then(
      () => {
        say(approved ? `Approved ${approval.tool}` : `Denied ${approval.tool}`);
        dispatchEvent(new Event("changed"));
      },
      (e: Error) => {
        setError(e.message);
        setBusy(false);
      },
    );
  };
  return (
    <article class="approval" aria-label={`${approval.tool}: ${approval.question}`} aria-busy={busy}>
      <header>
        <h3>{approval.question}</h3>
        <p class="facts">
          <code>{approval.tool}</code>
          {approval.reach && <Tag kind={approval.reach === "irreversible" ? "bad" : ""}>{approval.reach}</Tag>}
          <a href={link({ run: approval.run })}>{run ? `${run.mark}: ${run.title}` : approval.run}</a>
          <span>since {clock(approval.since)}</span>
        </p>
      </header>
      {/* Invisible characters are marked in it, and no line begins with text from a model. */}
      <pre class="approval-shown">{approval.shown}</pre>
      {editing && <ArgumentEditor value={approval.arguments} set={setArgs} />}
      {edited && <p class="note">The change shown was for the arguments as asked. Yours will be checked again.</p>}
      {error && <Problem text={error} />}
      <label class="wide">Reason <input type="text" value={reason} placeholder="told to the model when you deny" onInput={(e) => setReason(e.currentTarget.value)} /></label>
      <footer>
        <button type="button" class="small" aria-pressed={editing} onClick={() => setEditing(!editing)}>Edit arguments</button>
        <span class="grow" />
        <button type="button" class="danger" disabled={busy} onClick={() => answer(false)}>Deny</button>
        <button type="button" class="primary" disabled={busy || args === undefined} onClick={() => answer(true)}>Approve</button>
      </footer>
    </article>
  );
}
