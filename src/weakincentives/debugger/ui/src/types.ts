// What the server serves and an export embeds: see the contract in ../../views.py.

export type Outcome =
  | "committed" | "ok" | "rolled back" | "denied" | "refused" | "suspended" | "undone" | "partly undone" | "undo" | "dry run";

export interface RunSummary {
  id: string; mark: string; title: string; kind: string; model: string; began: number; saved: number;
  state: "running" | "finished" | "interrupted"; branch: string; dry: boolean; forkedFrom: string | null;
  turns: number; calls: number; tokens: number; cost: number | null; damage: string | null;
  /** Not while it goes on. */
  result?: RunResult | null;
}
export interface RunResult {
  files: Partial<Record<FileKind, number>>; outcomes: Partial<Record<Outcome, number>>; exit: number | null;
}
export interface BranchSummary {
  name: string; run: string | null; base: number; commits: number; files: string[]; inUse: boolean; time: number;
}
export interface Approval {
  run: string; id: string; call: string; tool: string; question: string; arguments: unknown; reach: string;
  shown: string; digest: string; since: number;
}
export interface Workspace {
  name: string; path: string; writable: boolean; runs: RunSummary[]; branches: BranchSummary[]; approvals: Approval[];
}

export interface Turn {
  n: number; text: string; calls: number[]; tokens: [number, number]; cost: number | null; user: string;
}
export interface CallRow {
  n: number; id: string; tool: string; summary: string; outcome: Outcome; time: number; duration: number;
  turn: number; nestedIn: number | null; place: number | null; lane: number; attempts: number; retries: number;
  conflicts: string[]; before: number; after: number; files: number; slices: string[]; error: string;
}
export type FileKind = "added" | "changed" | "deleted";
export interface Commit {
  serial: number; call: number | null; name: string; tool: string; time: number;
  files: [path: string, kind: FileKind, origin: string][];
}
export interface SliceRow { name: string; key: string; log: boolean; versions: number }
export interface RunView {
  run: RunSummary; turns: Turn[]; calls: CallRow[]; commits: Commit[]; base: number; prompts: number;
  slices: SliceRow[];
  /** Why the files of some calls are not known: their serials are -1. */
  note?: string;
}

export interface FileDiff {
  path: string; origin: string; kind: FileKind; added: number; removed: number; binary: boolean; note: string;
  patch: string;
}
export interface SliceDiff { name: string; key: string; log: boolean; before: unknown[]; after: unknown[] }
export interface CallView extends CallRow {
  text: string; arguments: unknown; edited: boolean; problems: Record<string, string>;
  policies: { name: string; answer: "allowed" | "denied" | "not asked"; note: string }[];
  result: string; message: string; value: unknown;
  failure: { code: string; message: string; recoverable: boolean; suggestions: string[] } | null;
  undone: string[]; notUndone: string[]; notes: string[]; changes: FileDiff[]; state: SliceDiff[]; canUndo: boolean;
}

export interface Tree { serial: number; paths: string[]; truncated: boolean }
export interface FileView {
  path: string; serial: number; exists: boolean; text: string | null; note: string; size: number;
}
export type Edit = [start: number, removed: number, added: string[]];
/** `path` is where the file was then: its history continues when it is moved. */
export interface FileStep {
  serial: number; call: number | null; name: string; path?: string; edits: Edit[] | null; note: string;
}
export interface Versions { path: string; base: string | null; note: string; steps: FileStep[] }
/** `between`: nobody called; it happened after that call, before the next one. */
export interface SliceStep { call: number; keep: number; added: unknown[]; between?: boolean }
export interface SliceHistory { key: string; name: string; log: boolean; steps: SliceStep[] }
export interface Prompt {
  turn: number; time: number; text: string; tools: string[]; sections: { path: string; text: string }[];
}
export interface Prompts { prompts: Prompt[] }

export type Where = "text" | "arguments" | "result" | "file";
export interface Hit {
  call: number | null; serial: number | null; where: Where; path: string; excerpt: string; at: number;
}
export interface Hits { hits: Hit[]; truncated: boolean }
export interface Comparison {
  files: [path: string, kind: "only a" | "only b" | "differs"][];
  slices: { key: string; name: string; a: unknown[]; b: unknown[] }[];
  truncated: boolean;
}

export interface Undone { undone: string[]; notes: string[]; changes?: FileDiff[] }
export interface Rewound { number: number | null; notes: string[]; changes?: FileDiff[] }
/** `run` is null where there is no conversation to continue. */
export interface Forked { branch: string; run: string | null }
