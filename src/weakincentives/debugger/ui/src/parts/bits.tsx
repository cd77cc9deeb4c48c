// Small pieces that every view uses.

import type { ComponentChildren } from "preact";
import type { Outcome as OutcomeName } from "../types.ts";

/** Each outcome has a shape, so that colour is never the only sign. Drawn on a grid of 16. */
const SHAPES: Record<OutcomeName, string> = {
  committed: "M8 2a6 6 0 1 1 0 12a6 6 0 1 1 0-12zM5 8.2l2.1 2.1L11 6.2",
  ok: "M8 5a3 3 0 1 1 0 6a3 3 0 1 1 0-6z",
  "rolled back": "M3 6h6.5a3.5 3.5 0 0 1 0 7H6M6 3L3 6l3 3",
  denied: "M8 2a6 6 0 1 1 0 12a6 6 0 1 1 0-12zM4 4l8 8",
  refused: "M4 4l8 8M12 4l-8 8",
  suspended: "M5.5 3.5v9M10.5 3.5v9",
  undone: "M8 2a6 6 0 1 1 0 12a6 6 0 1 1 0-12zM5 8h6",
  "partly undone": "M8 2a6 6 0 1 1 0 12a6 6 0 1 1 0-12zM5 8h3",
  undo: "M13 13a5 5 0 0 0-5-6H3M6 4L3 7l3 3",
  "dry run": "M8 2.5a5.5 5.5 0 0 1 5.5 5.5M8 13.5a5.5 5.5 0 0 1-5.5-5.5",
};

export function OutcomeIcon({ outcome }: { outcome: OutcomeName }) {
  return (
    <svg class={`icon is-${slug(outcome)}`} viewBox="0 0 16 16" aria-hidden="true">
      <path d={SHAPES[outcome] ?? ""} />
    </svg>
  );
}

export function Outcome({ outcome }: { outcome: OutcomeName }) {
  return (
    <span class={`outcome is-${slug(outcome)}`}>
      <OutcomeIcon outcome={outcome} />
      {outcome}
    </span>
  );
}

export const slug = (text: string): string => text.replace(/[^a-z]+/g, "-");

export function Tag({ children, kind = "" }: { children: ComponentChildren; kind?: string }) {
  return <span class={`tag ${kind}`}>{children}</span>;
}

export function Problem({ text }: { text: string }) {
  return <p class="problem" role="alert">{text}</p>;
}

export function Empty({ children }: { children: ComponentChildren }) {
  return <p class="empty">{children}</p>;
}

export function Section({ title, children, aside }: {
  title: string; children: ComponentChildren; aside?: ComponentChildren;
}) {
  return (
    <section class="block" aria-label={title}>
      <h3>{title}{aside !== undefined && <span class="aside">{aside}</span>}</h3>
      {children}
    </section>
  );
}

export function count(n: number, one: string, many = `${one}s`): string {
  return `${n.toLocaleString("en")} ${n === 1 ? one : many}`;
}

export function short(n: number): string {
  if (n < 1000) return String(n);
  if (n < 1_000_000) return `${(n / 1000).toFixed(n < 10_000 ? 1 : 0)}k`;
  return `${(n / 1_000_000).toFixed(1)}M`;
}

export function money(cost: number | null): string {
  if (cost === null) return "";
  return cost !== 0 && cost < 0.01 ? `$${cost.toPrecision(1)}` : `$${cost.toFixed(2)}`;
}

export function lasted(seconds: number): string {
  if (seconds < 0.0005) return "0 ms";
  if (seconds < 1) return `${Math.max(1, Math.round(seconds * 1000))} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

export function clock(time: number): string {
  return new Date(time * 1000).toLocaleTimeString("en-GB");
}

export function day(time: number): string {
  const at = new Date(time * 1000);
  const today = new Date().toDateString() === at.toDateString();
  return (today ? "" : `${at.toLocaleDateString("en-GB", { day: "numeric", month: "short", year: "numeric" })}, `)
    + at.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
}
