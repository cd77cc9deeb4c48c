// The address carries the state: back, forward and copied links work.

import { useEffect, useState } from "preact/hooks";

export const PANELS = ["call", "files", "state", "prompt", "search", "compare"] as const;
export type Panel = (typeof PANELS)[number];

export interface Place {
  run: string; call: number | null; panel: Panel; before: boolean;
  path: string; line: number; slice: string; turn: number; q: string;
  /** The other side of a comparison: RUN/N or RUN/N/before; N may be "last". */
  with: string;
}

/** As a line: the first one with the text that was searched for. */
export const FOUND = -1;

const EMPTY: Place = {
  run: "", call: null, panel: "call", before: false, path: "", line: 0, slice: "", turn: 0, q: "", with: "",
};

export function parse(hash: string): Place {
  const found = new URLSearchParams(hash.replace(/^#/, ""));
  const panel = PANELS.find((p) => p === found.get("panel")) ?? "call";
  const number = (name: string) => Number.parseInt(found.get(name) ?? "", 10);
  const text = (name: string) => found.get(name) ?? "";
  return {
    run: text("run"), call: Number.isNaN(number("call")) ? null : number("call"), panel,
    before: found.has("before"), path: text("path"), line: number("line") || 0, slice: text("slice"),
    turn: number("turn") || 0, q: text("q"), with: text("with"),
  };
}

export function format(place: Place): string {
  const out = new URLSearchParams();
  for (const [key, value] of Object.entries(place)) {
    if (value === EMPTY[key as keyof Place]) continue;
    out.set(key, value === true ? "" : String(value));
  }
  return `#${out.toString()}`;
}

/** Scrubbing replaces the entry of the history; every other move adds one. */
export function go(change: Partial<Place>, how: "push" | "replace" = "push"): void {
  const now = parse(location.hash);
  // A line belongs to the file or slice of its panel.
  const line = change.panel && change.panel !== now.panel ? 0 : now.line;
  const next = format({ ...now, line, ...change });
  if (next === location.hash) return;
  if (how === "replace") history.replaceState(null, "", next);
  else history.pushState(null, "", next);
  window.dispatchEvent(new Event("place"));
}

export function link(change: Partial<Place>): string {
  return format({ ...EMPTY, ...change });
}

export function usePlace(): Place {
  const [place, set] = useState(() => parse(location.hash));
  useEffect(() => {
    const read = () => set(parse(location.hash));
    for (const name of ["place", "popstate", "hashchange"]) addEventListener(name, read);
    return () => {
      for (const name of ["place", "popstate", "hashchange"]) removeEventListener(name, read);
    };
  }, []);
  return place;
}
