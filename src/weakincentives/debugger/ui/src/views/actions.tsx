// What a person can do at a call: undo, rewind, fork, edit and rerun. What would change is shown first.

import { useEffect, useState } from "preact/hooks";
import { useData } from "../data.ts";
import { say } from "../keys.ts";
import { Empty, Problem } from "../parts/bits.tsx";
import { Dialog } from "../parts/dialog.tsx";
import { at, source } from "../source.ts";
import type { CallRow, CallView, FileDiff, Forked, Prompts, Rewound, Undone } from "../types.ts";
import { go, link } from "../url.ts";
import { PatchView } from "./call.tsx";

export type Action = "undo" | "rewind" | "fork" | "rerun";

/** `wanted` is what a key asked for; its dialog opens as soon as the call is loaded. */
export function CallActions({ run, row, call, wanted, want }: {
  run: string; row: CallRow; call: CallView | undefined; wanted: Action | ""; want: (action: Action | "") => void;
}) {
  const open = call && (wanted !== "undo" || call.canUndo) ? wanted : "";
  const close = () => want("");
  const button = (action: Action, label: string, title: string, disabled = false) => (
    <button type="button" title={title} disabled={disabled} onClick={() => want(action)}>{label}</button>
  );
  useEffect(() => {
    if (!call || !wanted || open) return;
    say("There is nothing to undo");
    close();
  }, [call, wanted]);
  return (
    <div class="actions" role="group" aria-label="Actions at this call">
      {button("undo", "Undo", call?.canUndo ? "Undo this call (u)" : "Nothing to undo", !call?.canUndo)}
      {button("rewind", "Rewind", "Rewind the run to this call (r)")}
      {button("fork", "Fork here", "Continue from here on a branch (o)")}
      {button("rerun", "Edit and rerun", "Change this call and continue on a branch (e)", !call)}
      <button type="button" title="Compare another point with this one (c)" onClick={() => go({ panel: "compare", with: `${run}/${row.n}` })}>Compare</button>
      {open === "undo" && <Undo run={run} row={row} close={close} />}
      {open === "rewind" && <Rewind run={run} row={row} close={close} />}
      {open === "fork" && <Fork run={run} row={row} close={close} />}
      {open === "rerun" && call && <Rerun run={run} call={call} close={close} />}
    </div>
  );
}

/** Sends a request; while it runs the form is busy, and a refusal is shown in place. */
function useSend<T>(done: (answer: T) => void): { send: (path: string, body: unknown) => void; busy: boolean; error: string } {
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState("");
  const send = (path: string, body: unknown) => {
    setBusy(true);
    setError("");
    source.post<T>(path, body).then(done, (e: Error) => setError(e.message)).finally(() => setBusy(false));
  };
  return { send, busy, error };
}

function Preview({ changes, notes, error, busy }: { changes?: FileDiff[]; notes: string[]; error: string; busy: boolean }) {
  return (
    <section class="preview" aria-label="What would change" aria-busy={busy}>
      <h3>What would change</h3>
      {error && <Problem text={error} />}
      {notes.map((note, i) => <p key={i} class="note">{note}</p>)}
      {changes && changes.length === 0 && <Empty>No file.</Empty>}
      {changes?.map((change) => <PatchView key={change.path} change={change} />)}
      {busy && !changes && <Empty>Asking…</Empty>}
    </section>
  );
}

function Force({ value, set }: { value: boolean; set: (force: boolean) => void }) {
  return (
    <label class="check"><input type="checkbox" checked={value} onChange={(e) => set(e.currentTarget.checked)} />
      Even if files have changed since (their later content is lost)</label>
  );
}

function Undo({ run, row, close }: { run: string; row: CallRow; close: () => void }) {
  const [preview, setPreview] = useState<Undone>();
  const [force, setForce] = useState(false);
  const dry = useSend<Undone>(setPreview);
  const real = useSend<Undone>((answer) => {
    say(`Undone: ${answer.undone.join(", ")}`);
    changed();
    close();
  });
  const body = { call: row.n, force };
  useEffect(() => dry.send(`runs/${run}/undo`, { ...body, dryRun: true }), [force]);
  return (
    <Dialog title={`Undo call ${row.n}, ${row.tool}`} close={close}>
      <Preview changes={preview?.changes} notes={preview?.notes ?? []} error={dry.error} busy={dry.busy} />
      <Force value={force} set={setForce} />
      {real.error && <Problem text={real.error} />}
      <footer>
        <button type="button" onClick={close}>Cancel</button>
        <button type="button" class="primary" disabled={real.busy || dry.busy || Boolean(dry.error)}
          onClick={() => real.send(`runs/${run}/undo`, body)}>Undo the call</button>
      </footer>
    </Dialog>
  );
}

function Side({ value, set, row }: { value: boolean; set: (before: boolean) => void; row: CallRow }) {
  return (
    <fieldset>
      <legend>To the state</legend>
      <label class="check"><input type="radio" name="side" checked={!value} onChange={() => set(false)} /> after call {row.n}</label>
      <label class="check"><input type="radio" name="side" checked={value} onChange={() => set(true)} /> before call {row.n}</label>
    </fieldset>
  );
}

function Rewind({ run, row, close }: { run: string; row: CallRow; close: () => void }) {
  const [preview, setPreview] = useState<Rewound>();
  const [before, setBefore] = useState(false);
  const [parts, setParts] = useState("all");
  const [force, setForce] = useState(false);
  const dry = useSend<Rewound>(setPreview);
  const real = useSend<Rewound>((answer) => {
    say(`Rewound to ${before ? "before" : "after"} call ${row.n}. ${answer.notes.join(". ")}`);
    changed();
    close();
  });
  const body = { call: row.n, before, parts, force };
  useEffect(() => dry.send(`runs/${run}/rewind`, { ...body, dryRun: true }), [before, parts, force]);
  return (
    <Dialog title={`Rewind to call ${row.n}, ${row.tool}`} close={close}>
      <Side value={before} set={setBefore} row={row} />
      <label>What <select value={parts} onChange={(e) => setParts(e.currentTarget.value)}>
        <option value="all">files, session and conversation</option>
        <option value="files">files only</option>
        <option value="conversation">session and conversation only</option>
      </select></label>
      <Preview changes={preview?.changes} notes={preview?.notes ?? []} error={dry.error} busy={dry.busy} />
      <Force value={force} set={setForce} />
      {real.error && <Problem text={real.error} />}
      <footer>
        <button type="button" onClick={close}>Cancel</button>
        <button type="button" class="primary" disabled={real.busy || dry.busy || Boolean(dry.error)}
          onClick={() => real.send(`runs/${run}/rewind`, body)}>Rewind</button>
      </footer>
    </Dialog>
  );
}

function Fork({ run, row, close }: { run: string; row: CallRow; close: () => void }) {
  const [before, setBefore] = useState(false);
  const [name, setName] = useState("");
  const real = useSend<Forked>((answer) => {
    say(`Forked to branch ${answer.branch}`);
    changed();
    close();
    location.hash = answer.run ? link({ run: answer.run }) : "";
  });
  return (
    <Dialog title={`Fork at call ${row.n}, ${row.tool}`} close={close}>
      <p class="muted">A branch has its own files, session and conversation. This run stays as it is.</p>
      <Side value={before} set={setBefore} row={row} />
      <label>Name <input autofocus type="text" value={name} placeholder="chosen for you" onInput={(e) => setName(e.currentTarget.value)} /></label>
      {real.error && <Problem text={real.error} />}
      <footer>
        <button type="button" onClick={close}>Cancel</button>
        <button type="button" class="primary" disabled={real.busy}
          onClick={() => real.send(`runs/${run}/fork`, { call: row.n, before, ...(name ? { name } : {}) })}>Fork</button>
      </footer>
    </Dialog>
  );
}

/** The arguments as JSON, checked while they are typed. `set` gets undefined while they are not JSON. */
export function ArgumentEditor({ value, set }: { value: unknown; set: (value: unknown) => void }) {
  const [typed, setTyped] = useState(() => JSON.stringify(value, null, 2) ?? "");
  const [error, setError] = useState("");
  const type = (text: string) => {
    setTyped(text);
    try {
      set(JSON.parse(text));
      setError("");
    } catch (e) {
      set(undefined);
      setError((e as Error).message);
    }
  };
  return (
    <label class="wide">Arguments (JSON)
      <textarea autofocus spellcheck={false} rows={Math.min(14, typed.split("\n").length + 1)} value={typed} aria-invalid={Boolean(error)}
        onInput={(e) => type(e.currentTarget.value)} />
      <span class="problem-line" role="alert">{error}</span>
    </label>
  );
}

function Rerun({ run, call, close }: { run: string; call: CallView; close: () => void }) {
  const [args, setArgs] = useState<unknown>(call.arguments);
  const [section, setSection] = useState("");
  const [texts, setTexts] = useState<Record<string, string>>({});
  const [policies, setPolicies] = useState("");
  const [message, setMessage] = useState("");
  const [model, setModel] = useState("");
  const prompts = useData<Prompts>(at.prompts(run));
  const prompt = prompts.data?.prompts.findLast((p) => p.turn <= Math.max(1, call.turn));
  const sections = prompt?.sections ?? [];
  const real = useSend<Forked>((answer) => {
    say(`Running again on branch ${answer.branch}`);
    changed();
    close();
    location.hash = answer.run ? link({ run: answer.run, panel: "compare", with: `${run}/${call.n}` }) : "";
  });
  const rules = policies.split("\n").map((p) => p.trim()).filter(Boolean);
  const edited = JSON.stringify(args) !== JSON.stringify(call.arguments);
  const body = {
    call: call.n,
    ...(edited ? { arguments: args } : {}),
    ...(Object.keys(texts).length ? { sections: texts } : {}),
    ...(rules.length ? { policies: rules } : {}),
    ...(message.trim() ? { message: message.trim() } : {}),
    ...(model.trim() ? { model: model.trim() } : {}),
  };
  const shown = texts[section] ?? sections.find((s) => s.path === section)?.text ?? "";
  return (
    <Dialog title={`Edit call ${call.n}, ${call.tool}, and rerun`} close={close}>
      <p class="muted">The run continues on a new branch from just before this call. Earlier turns are replayed from the record; the model is not asked for them again.</p>
      <ArgumentEditor value={call.arguments} set={setArgs} />
      {sections.length > 0 && (
        <label class="wide">Prompt section
          <select value={section} onChange={(e) => setSection(e.currentTarget.value)}>
            <option value="">unchanged</option>
            {sections.map((s) => <option key={s.path} value={s.path}>{s.path}{s.path in texts ? " (edited)" : ""}</option>)}
          </select>
          {section && <textarea rows={8} aria-label={`Text of ${section}`} value={shown}
            onInput={(e) => setTexts({ ...texts, [section]: e.currentTarget.value })} />}
        </label>
      )}
      <label class="wide"><span>Policies, one a line, as for <code>--policy</code></span>
        <textarea rows={2} spellcheck={false} value={policies} onInput={(e) => setPolicies(e.currentTarget.value)} />
      </label>
      <details class="wide">
        <summary>Message and model</summary>
        <label class="wide">Message to the model <input type="text" value={message} onInput={(e) => setMessage(e.currentTarget.value)} /></label>
        <label class="wide">Model <input type="text" value={model} placeholder="as before" onInput={(e) => setModel(e.currentTarget.value)} /></label>
      </details>
      {real.error && <Problem text={real.error} />}
      <footer>
        <button type="button" onClick={close}>Cancel</button>
        <button type="button" class="primary" disabled={real.busy || args === undefined}
          onClick={() => real.send(`runs/${run}/rerun`, body)}>Run again on a branch</button>
      </footer>
    </Dialog>
  );
}

/** Tells the page that the record has changed. */
function changed(): void {
  dispatchEvent(new Event("changed"));
}
