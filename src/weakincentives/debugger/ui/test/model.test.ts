import assert from "node:assert/strict";
import { test } from "node:test";
import {
  asFolders, author, compareWorlds, diffLines, distinct, fileAt, filtered, merged, parsePatch, partAt, replaced, rows, search, serialAt,
  sliceAt, splitLines, textAt, treeAt, type Traced,
} from "../src/model.ts";
import type { CallRow, CallView, Commit, RunView, SliceHistory, Tree, Versions } from "../src/types.ts";

const call = (n: number, more: Partial<CallRow> = {}): CallRow => ({
  n, id: `c${n}`, tool: "edit_file", summary: "a.py", outcome: "committed", time: n, duration: 1, turn: n, nestedIn: null,
  place: null, lane: 0, attempts: 1, retries: 0, conflicts: [], before: 9 + n, after: 10 + n, files: 1, slices: [], error: "",
  ...more,
});
const commit = (serial: number, n: number | null, files: Commit["files"]): Commit => ({
  serial, call: n, name: `k3f/${n}`, tool: "edit_file", time: serial, files,
});
const view = (calls: CallRow[], commits: Commit[] = []): RunView => ({
  run: { id: "r" } as RunView["run"], calls, commits, base: 10, prompts: 0, slices: [],
  turns: calls.map((c) => ({ n: c.turn, text: `turn ${c.turn}`, calls: [c.n], tokens: [1, 1], cost: null, user: "" })),
});
const versions = (base: string | null, ...steps: Versions["steps"]): Versions => ({ path: "a.py", base, note: "", steps });
const step = (serial: number, n: number | null, edits: Versions["steps"][0]["edits"]) =>
  ({ serial, call: n, name: n === null ? "you" : `k3f/${n}`, edits, note: "" });

test("lines keep their ends, and a last line may have none", () => {
  assert.deepEqual(splitLines("a\n\nb"), ["a\n", "\n", "b"]);
  assert.deepEqual(splitLines(""), []);
  assert.deepEqual(splitLines("a\r\n"), ["a\r\n"]);
});

test("a file at a serial is its base with the edits until then", () => {
  const file = versions("1\n2\n3\n", step(11, 1, [[1, 1, ["two\n"]]]), step(12, 2, [[0, 0, ["0\n"]], [2, 1, []]]));

  assert.equal(textAt(file, 10), "1\n2\n3\n");
  assert.equal(textAt(file, 11), "1\ntwo\n3\n");
  assert.equal(textAt(file, 99), "0\n1\ntwo\n");
});

test("blame names the step that wrote each line, and keeps it when lines move", () => {
  const file = versions("1\n2\n3\n", step(11, 1, [[1, 1, ["two\n"]]]), step(12, 2, [[0, 0, ["0\n"]]]));

  assert.deepEqual(fileAt(file, 12).by, [1, -1, 0, -1]);
});

test("a file that is deleted and made again is blamed on who made it again", () => {
  const file = versions("1\n", step(11, 1, null), step(12, 2, [[0, 0, ["1\n"]]]));

  assert.equal(textAt(file, 11), null);
  assert.deepEqual(fileAt(file, 12), { exists: true, lines: ["1\n"], by: [1], note: "", path: "a.py" });
});

test("an author is a call of this run, another name, or nobody yet", () => {
  assert.equal(author(step(11, 4, [])), "call 4");
  assert.equal(author(step(11, null, [])), "you");
  assert.equal(author(undefined), "before the run");
});

test("the tree at a serial has what was added, and neither what was deleted nor what was moved away", () => {
  const tree: Tree = { serial: 10, paths: ["a.py", "b.py", "c.py"], truncated: false };
  const commits = [
    commit(11, 1, [["d.py", "added", ""]]), commit(12, 2, [["b.py", "deleted", ""]]), commit(13, 3, [["e.py", "added", "c.py"]]),
  ];

  assert.deepEqual(treeAt(tree, commits, 10), ["a.py", "b.py", "c.py"]);
  assert.deepEqual(treeAt(tree, commits, 12), ["a.py", "c.py", "d.py"]);
  assert.deepEqual(treeAt(tree, commits, 13), ["a.py", "d.py", "e.py"]);
});

test("folders hold folders and files in the order of the paths", () => {
  const root = asFolders(["README.md", "src/a/x.py", "src/b.py"]);

  assert.deepEqual(root.files, [{ name: "README.md", path: "README.md" }]);
  assert.equal(root.folders[0]!.path, "src");
  assert.equal(root.folders[0]!.folders[0]!.files[0]!.path, "src/a/x.py");
});

test("the serial before the first call, before a call and after it", () => {
  const run = view([call(1), call(2)]);

  assert.equal(serialAt(run, { call: 0, before: false }), 10);
  assert.equal(serialAt(run, { call: 2, before: true }), 11);
  assert.equal(serialAt(run, { call: 2, before: false }), 12);
});

const plan = (...statuses: string[]) => ({ steps: statuses.map((status, i) => ({ title: `step ${i}`, status })) });
const history = (log: boolean, ...steps: SliceHistory["steps"]): SliceHistory => ({ key: "P", name: "P", log, steps });

test("a slice at a call is folded from its steps", () => {
  const log = history(true, { call: 1, keep: 0, added: ["a"] }, { call: 3, keep: 1, added: ["b"] });
  const values = (n: number, before = false) => sliceAt(log, { call: n, before }).map((t) => t.value);

  assert.deepEqual(values(0), []);
  assert.deepEqual(values(2), ["a"]);
  assert.deepEqual(values(3), ["a", "b"]);
  assert.deepEqual(values(3, true), ["a"]);
});

test("blame of a slice names the call that wrote each value inside, not the one that rewrote the whole", () => {
  const slice = history(false,
    { call: 1, keep: 0, added: [plan("pending", "pending")] },
    { call: 2, keep: 0, added: [plan("done", "pending")] },
    { call: 3, keep: 0, added: [plan("done", "pending", "pending")] });
  const steps = sliceAt(slice, { call: 3, before: false })[0]!.fields!.steps!.items!;
  const status = (traced: Traced) => traced.fields!.status!.call;

  assert.deepEqual(steps.map(status), [2, 1, 3]);
  assert.equal(steps[0]!.fields!.title!.call, 1);
});

test("a value that moves when another is put before it keeps its call", () => {
  const slice = history(false, { call: 1, keep: 0, added: ["a", "b"] }, { call: 2, keep: 0, added: ["z", "a", "b"] });

  assert.deepEqual(sliceAt(slice, { call: 2, before: false }).map((t) => t.call), [2, 1, 1]);
});

test("a slice's field may have any name", () => {
  const slice = history(false, { call: 1, keep: 0, added: [JSON.parse('{"__proto__": 1, "constructor": 2}')] });

  assert.equal(sliceAt(slice, { call: 1, before: false })[0]!.fields!["__proto__"]!.value, 1);
});

test("a patch is read with the numbers of both sides", () => {
  const lines = parsePatch("--- a\n+++ b\n@@ -1,2 +1,2 @@\n one\n-two\n+2\n\\ No newline at end of file\n");

  assert.deepEqual(lines.map((l) => l.kind), ["@", " ", "-", "+", "@"]);
  assert.deepEqual(lines[3], { kind: "+", text: "2", a: 0, b: 2 });
});

test("the difference of two texts has every line of both", () => {
  const lines = diffLines(["a", "b", "c", "d"], ["a", "x", "c", "d", "e"]);

  assert.deepEqual(lines.map((l) => l.kind + l.text), [" a", "-b", "+x", " c", " d", "+e"]);
});

test("two worlds of a run differ in files and slices, and what came back is the same", () => {
  const run = view([call(1), call(2), call(3)], [
    commit(11, 1, [["a.py", "changed", ""]]), commit(12, 2, [["b.py", "added", ""]]), commit(13, 3, [["a.py", "changed", ""]]),
  ]);
  const tree: Tree = { serial: 10, paths: ["a.py"], truncated: false };
  const a = versions("1\n", step(11, 1, [[0, 1, ["2\n"]]]), step(13, 3, [[0, 1, ["1\n"]]]));
  const slice = history(false, { call: 2, keep: 0, added: [1] });
  const compare = (from: number, to: number) =>
    compareWorlds(tree, run, [slice], (path) => (path === "a.py" ? a : undefined), { call: from, before: false }, { call: to, before: false });

  assert.deepEqual(compare(1, 3).files, [["a.py", "differs"], ["b.py", "only b"]]);
  assert.deepEqual(compare(2, 0).files, [["a.py", "differs"], ["b.py", "only a"]]);
  assert.deepEqual(compare(0, 3).files, [["b.py", "only b"]]);
  assert.deepEqual(compare(1, 3).slices, [{ key: "P", name: "P", a: [], b: [1] }]);
});

test("two runs part at the first call that differs; those of a fork are numbered on", () => {
  const run = [call(1), call(2), call(3)];

  assert.equal(partAt(run, [call(1), call(2, { summary: "b.py" })]), 2);
  assert.equal(partAt(run, [call(3, { outcome: "denied" })]), 3);
  assert.equal(partAt(run, [call(2), call(3), call(4)]), 4);
});

test("the history of a moved file goes on under its new path", () => {
  const file = versions("1\n", { ...step(11, 1, [[0, 0, ["0\n"]]]), path: "old.py" }, { ...step(12, 2, []), path: "a.py" });

  assert.equal(fileAt(file, 11).path, "old.py");
  assert.deepEqual(fileAt(file, 12), { exists: true, lines: ["0\n", "1\n"], by: [0, -1], note: "", path: "a.py" });
});

test("what happens between two calls is there before the second, and not yet after the first", () => {
  const slice = history(false, { call: 1, keep: 0, added: [1] }, { call: 1, keep: 0, added: [2], between: true });
  const value = (n: number, before: boolean) => sliceAt(slice, { call: n, before })[0]?.value;

  assert.deepEqual([value(1, true), value(1, false), value(2, true)], [undefined, 1, 2]);
});

test("a filter by tool, outcome or path keeps the calls that pass all", () => {
  const run = view(
    [call(1), call(2, { tool: "read_file", outcome: "ok" }), call(3, { summary: "x" })], [commit(13, 3, [["src/Deep.py", "changed", ""]])],
  );
  const pass = (filter: object) => [...(filtered(run, { tool: "", outcome: "", path: "", ...filter }) ?? [])];

  assert.equal(filtered(run, { tool: "", outcome: "", path: "" }), null);
  assert.deepEqual(pass({ tool: "read_file" }), [2]);
  assert.deepEqual(pass({ outcome: "committed" }), [1, 3]);
  assert.deepEqual(pass({ path: "deep" }), [3]);
});

test("rows are turns with their calls; a nested call stands below its caller", () => {
  const run = view([call(1), call(2, { turn: 1, nestedIn: 1 }), call(3, { turn: 1 }), call(4, { turn: 2 })]);
  run.turns = [1, 2, 3].map((n) => ({ n, text: "", calls: run.calls.filter((c) => c.turn === n).map((c) => c.n), tokens: [0, 0], cost: null, user: n === 1 ? "do it" : "" }));
  const told = (shown: Set<number> | null) => rows(run, shown).map((r) =>
    r.kind === "call" ? `${" ".repeat(r.depth)}${r.call.n}` : r.kind === "turn" ? `turn ${r.turn.n}` : r.text);

  assert.deepEqual(told(null), ["do it", "turn 1", "1", " 2", "3", "turn 2", "4", "turn 3"]);
  assert.deepEqual(told(new Set([4])), ["turn 2", "4"]);
});

test("news of a live run are added, and replace what they say again", () => {
  const old = view([call(1), call(2, { outcome: "suspended" })], [commit(11, 1, [])]);
  const news = view([call(2), call(3)], [commit(12, 2, [])]);
  const both = merged(old, { ...news, base: 0 });

  assert.deepEqual(both.calls.map((c) => c.outcome), ["committed", "committed", "committed"]);
  assert.deepEqual(both.commits.map((c) => c.serial), [11, 12]);
  assert.equal(both.base, 10);
});

test("a line that versions of a file keep is one hit, where it came first", () => {
  const hit = (serial: number | null, excerpt = "x") => ({ call: serial, serial, where: "file" as const, path: "a.py", excerpt, at: 0 });

  assert.deepEqual(distinct([hit(9), hit(7), hit(8), hit(3, "y")]).map((h) => h.serial), [7, 3]);
});

test("search finds text, arguments, results and the lines that calls wrote", () => {
  const calls = [
    { ...call(1), text: "I look for the Needle", arguments: { q: "needle" }, result: "none" },
    { ...call(2), text: "and more", arguments: {}, result: "a needle" },
  ] as CallView[];
  const file = versions("hay\n", step(12, 2, [[0, 0, ["the needle\n"]]]));
  const found = search("needle", new Set(["text", "arguments", "result", "file"]), calls, [file]);

  assert.deepEqual(found.hits.map((h) => [h.call, h.where]), [[1, "text"], [1, "arguments"], [2, "result"], [2, "file"]]);
  assert.equal(found.hits[0]!.excerpt.slice(found.hits[0]!.at).toLowerCase(), "needle");
  assert.deepEqual(search("needle", new Set(["result"]), calls, [file]).hits.length, 1);
  assert.equal(search("e", new Set(["text"]), calls, [], 1).truncated, true);
});

test("lines that replace each other are found in pairs, as far as there are as many", () => {
  const patch = "@@ -1,5 +1,4 @@\n-a\n-b\n+A\n c\n+new\n-d\n+D\n+E";

  const lines = parsePatch(patch);

  const text = (i: number) => lines[i]!.text;
  assert.deepEqual(replaced(lines).map(([i, j]) => [text(i), text(j)]), [["a", "A"], ["d", "D"]]);
});
