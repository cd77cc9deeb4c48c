// Differences: a unified patch as lines, and two texts side by side in CodeMirror's merge view.

import { MergeView, presentableDiff } from "@codemirror/merge";
import { EditorState } from "@codemirror/state";
import { EditorView, lineNumbers } from "@codemirror/view";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { replaced, type DiffLine, type Span } from "../model.ts";
import { coloredDiff, language, marked, type Token } from "./syntax.ts";

const MOST = 400;
const LONGEST = 500;

/** What differs within lines that replace each other, unless that is most of them. */
function changedParts(lines: DiffLine[]): Map<number, Span[]> {
  const found = new Map<number, Span[]>();
  for (const [i, j] of replaced(lines)) {
    const [a, b] = [lines[i]!.text, lines[j]!.text];
    if (Math.max(a.length, b.length) > LONGEST) continue;
    const changes = presentableDiff(a, b);
    const left = changes.map((c): Span => [c.fromA, c.toA]);
    const right = changes.map((c): Span => [c.fromB, c.toB]);
    const size = (spans: Span[]) => spans.reduce((n, [from, to]) => n + to - from, 0);
    if (size(left) + size(right) > 0.7 * (a.length + b.length)) continue;
    found.set(i, left).set(j, right);
  }
  return found;
}

export function Tokens({ tokens, spans = [] }: { tokens: Token[]; spans?: Span[] }) {
  return <>{marked(tokens, spans).map(([text, tone, changed], i) => (
    tone || changed ? <span key={i} class={`${tone} ${changed ? "within" : ""}`}>{text}</span> : text
  ))}</>;
}

export function DiffLines({ lines, label, path = "" }: { lines: DiffLine[]; label: string; path?: string }) {
  const [all, setAll] = useState(false);
  const shown = useMemo(() => (all ? lines : lines.slice(0, MOST)), [lines, all]);
  const colors = useMemo(() => coloredDiff(shown, path), [shown, path]);
  const within = useMemo(() => changedParts(shown), [shown]);
  return (
    <div class="diff" role="group" aria-label={label} tabIndex={0}>
      <table>
        <tbody>
          {shown.map((line, i) => line.kind === "@"
            ? <tr key={i} class="hunk"><td colSpan={3}>{line.text}</td></tr>
            : (
              <tr key={i} class={line.kind === "+" ? "added" : line.kind === "-" ? "removed" : ""}>
                <td class="number">{line.a || line.b}</td>
                <td class="sign">{line.kind}</td>
                <td class="text"><Tokens tokens={colors[i] ?? [[line.text, ""]]} spans={within.get(i)} /></td>
              </tr>
            ))}
        </tbody>
      </table>
      {lines.length > shown.length && (
        <button type="button" class="more" onClick={() => setAll(true)}>Show {lines.length - shown.length} more lines</button>
      )}
    </div>
  );
}

const THEME = EditorView.theme({
  "&": { color: "var(--text)", backgroundColor: "var(--surface)", fontSize: "12px" },
  ".cm-scroller": { fontFamily: "var(--mono)", lineHeight: "20px" },
  ".cm-gutters": { color: "var(--muted)", backgroundColor: "var(--raised)", borderRight: "1px solid var(--rule)" },
  ".cm-deletedChunk, &.cm-merge-a .cm-changedLine": { backgroundColor: "var(--removed)" },
  "&.cm-merge-b .cm-changedLine": { backgroundColor: "var(--added)" },
  "&.cm-merge-a .cm-changedText": { background: "var(--removed-strong)" },
  "&.cm-merge-b .cm-changedText": { background: "var(--added-strong)" },
  ".cm-collapsedLines": {
    color: "var(--muted)", background: "var(--raised)", borderBlock: "1px solid var(--rule)", padding: "2px 8px",
  },
  // The font may lack the sign that it has by default.
  ".cm-collapsedLines:before, .cm-collapsedLines:after": { content: '"⋯"' },
  ".cm-cursor": { borderLeftColor: "var(--text)" },
  "&.cm-focused": { outline: "2px solid var(--accent)", outlineOffset: "-2px" },
});

/** CodeMirror lives in a shadow root: only there its styles need no <style> element, which the policy forbids. */
export function SideBySide({ a, b, label, path = label }: { a: string; b: string; label: string; path?: string }) {
  const host = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const node = host.current;
    if (!node) return;
    const root = node.shadowRoot ?? node.attachShadow({ mode: "open" });
    const side = (doc: string, name: string) => ({
      doc,
      extensions: [
        lineNumbers(), language(path), EditorState.readOnly.of(true), EditorView.lineWrapping, THEME,
        EditorView.contentAttributes.of({ "aria-label": `${label}, ${name}`, "aria-readonly": "true" }),
      ],
    });
    const view = new MergeView({
      a: side(a, "left"), b: side(b, "right"), parent: root, root,
      collapseUnchanged: { margin: 3, minSize: 6 }, diffConfig: { scanLimit: 2000, timeout: 300 },
    });
    return () => view.destroy();
  }, [a, b]);
  return <div class="merge" ref={host} />;
}
