// Pure functions from what the server serves to what the page shows. No DOM, no requests.

import type {
  CallRow, CallView, Commit, Comparison, Edit, FileStep, Hit, Hits, RunView, SliceHistory, Tree, Turn, Versions, Where,
} from "./types.ts";

/** A world: the state just before or just after a call. Call 0 is the state before the run. */
export interface Point { call: number; before: boolean }

/** The serial of the files' history at a point. */
export function serialAt(view: RunView, point: Point): number {
  const call = view.calls.find((c) => c.n === point.call);
  if (!call) return view.base;
  return point.before ? call.before : call.after;
}

/** The paths at a serial, sorted. */
export function treeAt(tree: Tree, commits: Commit[], serial: number): string[] {
  const paths = new Set(tree.paths);
  for (const commit of commits) {
    if (commit.serial > serial) break;
    for (const [path, kind, origin] of commit.files) {
      if (origin && kind !== "deleted") paths.delete(origin);
      if (kind === "deleted") paths.delete(path);
      else paths.add(path);
    }
  }
  return [...paths].sort();
}

/** The paths that a commit within (after, until] touched, with the last commit to do so. */
export function touched(commits: Commit[], after: number, until: number): Map<string, Commit> {
  const found = new Map<string, Commit>();
  for (const commit of commits) {
    if (commit.serial <= after) continue;
    if (commit.serial > until) break;
    for (const [path] of commit.files) found.set(path, commit);
  }
  return found;
}

export interface Folder { name: string; path: string; folders: Folder[]; files: { name: string; path: string }[] }

/** Sorted paths as a tree of folders. A chain of folders with a single child stays separate. */
export function asFolders(paths: string[]): Folder {
  const root: Folder = { name: "", path: "", folders: [], files: [] };
  const known = new Map<string, Folder>([["", root]]);
  const folder = (path: string): Folder => {
    const there = known.get(path);
    if (there) return there;
    const cut = path.lastIndexOf("/");
    const made: Folder = { name: path.slice(cut + 1), path, folders: [], files: [] };
    known.set(path, made);
    folder(cut < 0 ? "" : path.slice(0, cut)).folders.push(made);
    return made;
  };
  for (const path of paths) {
    const cut = path.lastIndexOf("/");
    folder(cut < 0 ? "" : path.slice(0, cut)).files.push({ name: path.slice(cut + 1), path });
  }
  return root;
}

// Files

export function splitLines(text: string): string[] {
  return text.match(/[^\n]*\n|[^\n]+$/g) ?? [];
}

/** A file at a serial. `by[i]` is the step that wrote line i; -1: it was there before the run. */
export interface Blamed {
  exists: boolean; lines: string[]; by: number[]; note: string;
  /** Where the file was then, if it was moved later. */
  path: string;
}

function apply(lines: string[], by: number[], edits: Edit[], step: number): [string[], number[]] {
  const newLines: string[] = [];
  const newBy: number[] = [];
  let at = 0;
  const copy = (end: number) => {
    for (; at < end && at < lines.length; at++) {
      newLines.push(lines[at]!);
      newBy.push(by[at]!);
    }
  };
  for (const [start, removed, added] of edits) {
    copy(start);
    at = start + removed;
    for (const line of added) {
      newLines.push(line);
      newBy.push(step);
    }
  }
  copy(lines.length);
  return [newLines, newBy];
}

export function fileAt(versions: Versions, serial: number): Blamed {
  let exists = versions.base !== null;
  let lines = splitLines(versions.base ?? "");
  let by: number[] = lines.map(() => -1);
  let note = versions.note;
  let path = versions.steps[0]?.path ?? versions.path;
  for (const [index, step] of versions.steps.entries()) {
    if (step.serial > serial) break;
    note = step.note;
    path = step.path ?? path;
    if (step.edits === null) [exists, lines, by] = [false, [], []];
    else {
      [lines, by] = apply(lines, by, step.edits, index);
      exists = true;
    }
  }
  return { exists, lines, by, note, path };
}

export function textAt(versions: Versions, serial: number): string | null {
  const file = fileAt(versions, serial);
  return file.exists ? file.lines.join("") : null;
}

/** Who wrote a step: "call 12" of this run, or the name of another run or a person. */
export function author(step: FileStep | undefined): string {
  if (!step) return "before the run";
  return step.call === null ? step.name || "outside the run" : `call ${step.call}`;
}

// Slices

/** A JSON value with, for every leaf and container, the call that wrote it. */
export interface Traced { value: unknown; call: number; items?: Traced[]; fields?: Record<string, Traced> }

const isObject = (value: unknown): value is Record<string, unknown> =>
  typeof value === "object" && value !== null && !Array.isArray(value);

export function same(a: unknown, b: unknown): boolean {
  if (a === b) return true;
  if (Array.isArray(a) && Array.isArray(b)) return a.length === b.length && a.every((x, i) => same(x, b[i]));
  if (!isObject(a) || !isObject(b)) return false;
  const keys = Object.keys(a);
  return keys.length === Object.keys(b).length && keys.every((k) => Object.hasOwn(b, k) && same(a[k], b[k]));
}

function trace(value: unknown, call: number, old?: Traced): Traced {
  if (old && same(old.value, value)) return old;
  if (Array.isArray(value)) return { value, call, items: traceItems(value, call, old?.items ?? []) };
  if (isObject(value)) {
    const fields: Record<string, Traced> = Object.create(null);
    for (const [key, item] of Object.entries(value)) fields[key] = trace(item, call, old?.fields?.[key]);
    return { value, call, fields };
  }
  return { value, call };
}

/** Items at the same distance from the equal head or the equal tail are versions of each other. */
function traceItems(values: unknown[], call: number, old: Traced[]): Traced[] {
  let head = 0;
  while (head < values.length && head < old.length && same(values[head], old[head]!.value)) head++;
  let tail = 0;
  while (tail < values.length - head && tail < old.length - head
    && same(values[values.length - 1 - tail], old[old.length - 1 - tail]!.value)) tail++;
  return values.map((value, i) => {
    if (i < head) return old[i]!;
    if (i >= values.length - tail) return old[old.length - (values.length - i)]!;
    return trace(value, call, i < old.length - tail ? old[i] : undefined);
  });
}

/** The steps that had happened at a point. Just after a call, nothing between it and the next has. */
function stepsAt(history: SliceHistory, point: Point): SliceHistory["steps"] {
  const last = history.steps.findLastIndex((s) =>
    s.call < point.call || (s.call === point.call && !point.before && (!s.between || point.call === 0)));
  return history.steps.slice(0, last + 1);
}

/** The values of a slice at a point, each with the call that wrote it. */
export function sliceAt(history: SliceHistory, point: Point): Traced[] {
  let values: Traced[] = [];
  for (const { call, keep, added } of stepsAt(history, point)) {
    const kept = values.slice(0, keep);
    values = history.log
      ? [...kept, ...added.map((value) => ({ value, call }))]
      : [...kept, ...traceItems(added, call, values.slice(keep))];
  }
  return values;
}

// Differences

export type DiffLine = { kind: " " | "+" | "-"; text: string; a: number; b: number } | { kind: "@"; text: string };

/** The lines of a unified diff with the numbers they have on both sides. */
export function parsePatch(patch: string): DiffLine[] {
  const found: DiffLine[] = [];
  let a = 0, b = 0, inside = false;
  for (const line of patch.replace(/\n$/, "").split("\n")) {
    const head = /^@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@/.exec(line);
    if (head) {
      [a, b, inside] = [Number(head[1]), Number(head[2]), true];
      found.push({ kind: "@", text: line });
    } else if (inside) {
      const kind = line[0];
      const text = line.slice(1);
      if (kind === "+") found.push({ kind, text, a: 0, b: b++ });
      else if (kind === "-") found.push({ kind, text, a: a++, b: 0 });
      else if (kind === " " || line === "") found.push({ kind: " ", text, a: a++, b: b++ });
      else found.push({ kind: "@", text: line });
    }
  }
  return found;
}

/** A part of a line, from and to. */
export type Span = readonly [number, number];

/** The lines of a diff that replace each other: a removed one, and the added one in its place. */
export function replaced(lines: DiffLine[]): [removed: number, added: number][] {
  const found: [number, number][] = [];
  for (let i = 0; i < lines.length; i++) {
    if (lines[i]!.kind !== "-") continue;
    let middle = i;
    while (lines[middle]?.kind === "-") middle++;
    let end = middle;
    while (lines[end]?.kind === "+") end++;
    for (let k = 0; k < Math.min(middle - i, end - middle); k++) found.push([i + k, middle + k]);
    i = Math.max(i, end - 1);
  }
  return found;
}

/** Where two texts of JSON, or of anything else, differ, line by line. */
export function diffLines(a: string[], b: string[]): DiffLine[] {
  let head = 0;
  while (head < a.length && head < b.length && a[head] === b[head]) head++;
  let tail = 0;
  while (tail < a.length - head && tail < b.length - head
    && a[a.length - 1 - tail] === b[b.length - 1 - tail]) tail++;
  const middleA = a.slice(head, a.length - tail);
  const middleB = b.slice(head, b.length - tail);
  const found: DiffLine[] = [];
  const both = (i: number, j: number) => found.push({ kind: " ", text: a[i]!, a: i + 1, b: j + 1 });
  const gone = (i: number) => found.push({ kind: "-", text: a[i]!, a: i + 1, b: 0 });
  const come = (j: number) => found.push({ kind: "+", text: b[j]!, a: 0, b: j + 1 });
  for (let i = 0; i < head; i++) both(i, i);
  const [n, m] = [middleA.length, middleB.length];
  if (n * m > 1_000_000) {
    // Too large for a table: everything between is replaced.
    for (let i = 0; i < n; i++) gone(head + i);
    for (let j = 0; j < m; j++) come(head + j);
  } else {
    const width = m + 1;
    const common = new Uint32Array((n + 1) * width);
    for (let i = n - 1; i >= 0; i--)
      for (let j = m - 1; j >= 0; j--)
        common[i * width + j] = middleA[i] === middleB[j]
          ? common[(i + 1) * width + j + 1]! + 1
          : Math.max(common[(i + 1) * width + j]!, common[i * width + j + 1]!);
    let [i, j] = [0, 0];
    while (i < n || j < m) {
      if (i < n && j < m && middleA[i] === middleB[j]) both(head + i++, head + j++);
      else if (j === m || (i < n && common[(i + 1) * width + j]! >= common[i * width + j + 1]!)) gone(head + i++);
      else come(head + j++);
    }
  }
  for (let k = tail; k > 0; k--) both(a.length - k, b.length - k);
  return found;
}

export function jsonLines(value: unknown): string[] {
  return JSON.stringify(value, null, 2)?.split("\n") ?? [];
}

/** Two worlds of one run. */
export function compareWorlds(
  tree: Tree, view: RunView, slices: SliceHistory[], versions: (path: string) => Versions | undefined, a: Point, b: Point,
): Comparison {
  const [from, to] = [serialAt(view, a), serialAt(view, b)];
  const inA = new Set(treeAt(tree, view.commits, from));
  const inB = new Set(treeAt(tree, view.commits, to));
  const files: Comparison["files"] = [];
  const changed = touched(view.commits, Math.min(from, to), Math.max(from, to));
  for (const path of new Set([...changed.keys(), ...symmetricDifference(inA, inB)])) {
    if (inA.has(path) !== inB.has(path)) files.push([path, inA.has(path) ? "only a" : "only b"]);
    else if (inA.has(path)) {
      const known = versions(path);
      if (!known || textAt(known, from) === null || textAt(known, from) !== textAt(known, to)) files.push([path, "differs"]);
    }
  }
  files.sort((x, y) => (x[0] < y[0] ? -1 : 1));
  const differing = slices.map((history) => ({
    key: history.key, name: history.name,
    a: sliceAt(history, a).map((t) => t.value), b: sliceAt(history, b).map((t) => t.value),
  })).filter((slice) => !same(slice.a, slice.b));
  return { files, slices: differing, truncated: false };
}

function symmetricDifference(a: Set<string>, b: Set<string>): string[] {
  return [...[...a].filter((x) => !b.has(x)), ...[...b].filter((x) => !a.has(x))];
}

/** The number of the first call in which two runs differ. The calls of a fork are numbered on. */
export function partAt(a: CallRow[], b: CallRow[]): number {
  const start = Math.max(a[0]?.n ?? 1, b[0]?.n ?? 1);
  const theirs = new Map(b.map((c) => [c.n, c]));
  let n = start;
  for (const mine of a) {
    const other = theirs.get(mine.n);
    if (mine.n < n) continue;
    if (!other || mine.tool !== other.tool || mine.summary !== other.summary || mine.outcome !== other.outcome) break;
    n = mine.n + 1;
  }
  return n;
}

// Timeline

export interface Filter { tool: string; outcome: string; path: string }

/** The numbers of the calls that pass, or null when there is no filter. */
export function filtered(view: RunView, filter: Filter): Set<number> | null {
  if (!filter.tool && !filter.outcome && !filter.path) return null;
  const path = filter.path.toLowerCase();
  const onPath = new Set<number>();
  if (path)
    for (const commit of view.commits)
      if (commit.call !== null && commit.files.some((f) => f[0].toLowerCase().includes(path))) onPath.add(commit.call);
  const passes = (call: CallRow) =>
    (!filter.tool || call.tool === filter.tool)
    && (!filter.outcome || call.outcome === filter.outcome)
    && (!path || onPath.has(call.n) || call.summary.toLowerCase().includes(path));
  return new Set(view.calls.filter(passes).map((c) => c.n));
}

export type Row =
  | { kind: "user"; turn: number; text: string }
  | { kind: "turn"; turn: Turn }
  | { kind: "call"; call: CallRow; depth: number };

/** Turns and calls in the order of the list. A nested call stands below the call that made it. */
export function rows(view: RunView, shown: Set<number> | null): Row[] {
  const turns = new Map(view.turns.map((t) => [t.n, t]));
  const children = new Map<number, CallRow[]>();
  const tops: CallRow[] = [];
  const known = new Set(view.calls.map((c) => c.n));
  for (const call of view.calls) {
    if (call.nestedIn !== null && known.has(call.nestedIn)) {
      const siblings = children.get(call.nestedIn);
      if (siblings) siblings.push(call);
      else children.set(call.nestedIn, [call]);
    } else tops.push(call);
  }
  const found: Row[] = [];
  const put = (call: CallRow, depth: number) => {
    if (!shown || shown.has(call.n)) found.push({ kind: "call", call, depth });
    for (const child of children.get(call.n) ?? []) put(child, depth + 1);
  };
  let last = 0;
  const turnsUntil = (n: number) => {
    // Turns without a call stand at their place, too.
    for (; last < n; last++) {
      const turn = turns.get(last + 1);
      if (!turn || (shown && !turn.calls.some((c) => shown.has(c)))) continue;
      if (turn.user) found.push({ kind: "user", turn: turn.n, text: turn.user });
      found.push({ kind: "turn", turn });
    }
  };
  for (const call of tops) {
    turnsUntil(call.turn);
    put(call, 0);
  }
  if (!shown) turnsUntil(Math.max(0, ...view.turns.slice(-1).map((t) => t.n)));
  return found;
}

const FAILED = new Set(["rolled back", "denied", "refused", "suspended"]);
export const isProblem = (call: CallRow): boolean => FAILED.has(call.outcome);

/** A live run's news, joined to what is known. Rows that come again replace the old ones. */
export function merged(old: RunView, news: RunView): RunView {
  const join = <T>(before: T[], after: T[], key: (item: T) => number): T[] => {
    const again = new Set(after.map(key));
    return [...before.filter((item) => !again.has(key(item))), ...after].sort((x, y) => key(x) - key(y));
  };
  return {
    ...news,
    turns: join(old.turns, news.turns, (t) => t.n),
    calls: join(old.calls, news.calls, (c) => c.n),
    commits: join(old.commits, news.commits, (c) => c.serial),
    base: old.base,
  };
}

// Search in the page: an export has no server.

/** Versions of a file that keep a line are one hit: the oldest that has it. */
export function distinct(hits: Hit[]): Hit[] {
  const oldest = new Map<string, Hit>();
  const key = (hit: Hit) => `${hit.path}\n${hit.excerpt}`;
  for (const hit of hits) {
    const known = oldest.get(key(hit));
    if (hit.where === "file" && (!known || (hit.serial ?? 0) < (known.serial ?? 0))) oldest.set(key(hit), hit);
  }
  return hits.filter((hit) => hit.where !== "file" || oldest.get(key(hit)) === hit);
}

const BEFORE = 40, AFTER = 120;

function excerpt(text: string, at: number): { excerpt: string; at: number } {
  const start = Math.max(0, at - BEFORE);
  return { excerpt: text.slice(start, at + AFTER), at: at - start };
}

/** Every place where the text occurs, at most `limit`. A line that a file keeps is found once, where it was written. */
export function search(
  query: string, where: Set<Where>, calls: CallView[], versions: Versions[], limit = 200,
): Hits {
  const wanted = query.toLowerCase();
  const hits: Hit[] = [];
  if (!wanted) return { hits, truncated: false };
  const look = (text: string, hit: Pick<Hit, "call" | "serial" | "where" | "path">) => {
    const at = text.toLowerCase().indexOf(wanted);
    if (at >= 0) hits.push({ ...hit, ...excerpt(text, at) });
  };
  let turn = -1;
  for (const call of calls) {
    const place = { call: call.n, serial: null, path: "" };
    if (where.has("text") && (call.turn !== turn || !call.turn)) look(call.text, { ...place, where: "text" });
    turn = call.turn;
    if (where.has("arguments")) look(JSON.stringify(call.arguments) ?? "", { ...place, where: "arguments" });
    if (where.has("result")) look(call.result, { ...place, where: "result" });
  }
  if (where.has("file"))
    for (const file of versions) {
      look(file.base ?? "", { call: null, serial: null, where: "file", path: file.path });
      for (const step of file.steps)
        look((step.edits ?? []).flatMap((e) => e[2]).join(""),
          { call: step.call, serial: step.serial, where: "file", path: file.path });
    }
  return { hits: hits.slice(0, limit), truncated: hits.length > limit };
}
