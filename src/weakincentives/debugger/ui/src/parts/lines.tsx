// Lines of text, each with the call that wrote it: files and slices are shown so.

import { useEffect, useMemo, useRef } from "preact/hooks";
import type { CallRow } from "../types.ts";
import { Tokens } from "./diff.tsx";
import { colored } from "./syntax.ts";
import { Virtual } from "./virtual.tsx";

export interface Line { text: string; call: number | null; author: string }

interface Props {
  lines: Line[];
  calls: Map<number, CallRow>;
  /** The chosen line, from 1; 0: none. */
  chosen: number;
  choose: (line: number) => void;
  open: (call: number) => void;
  label: string;
  /** Lines that the call at this point wrote are marked. */
  now: number;
  numbers?: boolean;
  /** Its ending names the language. */
  path: string;
}

const LONGEST = 2000;
const ROW = 20;

export function Lines(props: Props) {
  const { lines, calls, chosen, now } = props;
  const width = String(lines.length).length;
  const holder = useRef<HTMLDivElement>(null);
  const colors = useMemo(() => colored(lines.map((l) => l.text.replace(/\r?\n$/, "")).join("\n"), props.path), [lines, props.path]);
  const longest = useMemo(() => Math.min(LONGEST, lines.reduce((n, l) => Math.max(n, l.text.length), 0)), [lines]);
  useEffect(() => {
    if (chosen > lines.length && lines.length) props.choose(lines.length);
  }, [chosen, lines.length]);

  const move = (event: KeyboardEvent) => {
    const page = Math.max(1, Math.floor((holder.current?.clientHeight ?? 400) / ROW) - 1);
    const steps: Record<string, number> = {
      ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -lines.length, End: lines.length,
    };
    const step = steps[event.key];
    const call = lines[chosen - 1]?.call;
    if (step !== undefined && !event.altKey && !event.ctrlKey && !event.metaKey)
      props.choose(Math.min(lines.length, Math.max(1, chosen + step)));
    else if (event.key === "Enter" && call) props.open(call);
    else return;
    event.preventDefault();
    event.stopPropagation();
  };

  return (
    <Virtual holder={holder} class="lines" count={lines.length} rowHeight={ROW} active={chosen - 1} align="middle"
      label={props.label} activeId={chosen ? `line-${chosen}` : undefined} onKeyDown={move}
      render={(i) => {
        const line = lines[i]!;
        const call = line.call === null ? undefined : calls.get(line.call);
        const first = i === 0 || lines[i - 1]!.author !== line.author;
        const by = call ? `#${call.n} ${call.tool}` : line.author;
        const [short, ...rest] = by.split(" "); // where it is narrow, the first word must do
        const text = line.text.replace(/\r?\n$/, "");
        return (
          <div key={i} id={`line-${i + 1}`} role="option" aria-selected={chosen === i + 1}
            aria-label={`Line ${i + 1}, by ${call ? `call ${call.n}, ${call.tool}` : line.author}: ${text.slice(0, 200)}`}
            class={`line ${chosen === i + 1 ? "chosen" : ""} ${line.call !== null && line.call === now ? "fresh" : ""}`}
            style={{ minWidth: `calc(${longest}ch + 16rem)` }}
            onClick={() => props.choose(i + 1)} onDblClick={() => line.call && props.open(line.call)}>
            <span class={`by ${first ? "" : "again"} ${call ? "" : "outside"}`} title={by}>{short}<span class="rest"> {rest.join(" ")}</span></span>
            {props.numbers !== false && <span class="number" style={{ minWidth: `${width}ch` }}>{i + 1}</span>}
            <span class="text">
              {text.length > LONGEST ? `${text.slice(0, LONGEST)}…` : colors ? <Tokens tokens={colors[i] ?? [[text, ""]]} /> : text}
            </span>
          </div>
        );
      }} />
  );
}
