// The run at a glance: the minimap with the scrubber over it, and below it the lanes around the chosen
// call, which zoom. Both are canvases; the slider is what keyboards and screen readers use.

import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { slug } from "../parts/bits.tsx";
import { isProblem, type Point } from "../model.ts";
import type { CallRow } from "../types.ts";

export type Scale = "calls" | "time";
export const ZOOMS = [1, 2, 4, 8, 16, 32, 64, 128];

interface Props {
  calls: CallRow[];
  point: Point;
  scrub: (n: number) => void;
  zoom: number;
  setZoom: (zoom: number) => void;
  scale: Scale;
  setScale: (scale: Scale) => void;
  setBefore: (before: boolean) => void;
}

const LANES = 4;
const laneHeight = (lanes: number) => (lanes === 1 ? 24 : 20);

export function Strip(props: Props) {
  const { calls, point, scrub } = props;
  const index = Math.max(0, calls.findIndex((c) => c.n === point.call));
  const step = (by: number) => {
    const next = calls[Math.min(calls.length - 1, Math.max(0, index + by))];
    if (next) scrub(next.n);
  };
  const here = calls[index];
  return (
    <section class="strip" aria-label="Scrubber">
      <div class="strip-bar">
        <button type="button" class="small" aria-label="Previous call" title="Previous call (k)" onClick={() => step(-1)}>‹</button>
        <button type="button" class="small" aria-label="Next call" title="Next call (j)" onClick={() => step(1)}>›</button>
        <span class="strip-where">Call <b>{here?.n ?? 0}</b> of {calls.length.toLocaleString("en")}</span>
        <div class="choice" role="group" aria-label="State to show">
          <button type="button" class="small" aria-pressed={point.before} title="The state before this call (b)"
            onClick={() => props.setBefore(true)}>before</button>
          <button type="button" class="small" aria-pressed={!point.before} title="The state after this call (b)"
            onClick={() => props.setBefore(false)}>after</button>
        </div>
        <div class="strip-tools">
        <div class="choice" role="group" aria-label="Scale">
          <button type="button" class="small" aria-pressed={props.scale === "calls"} onClick={() => props.setScale("calls")}>calls</button>
          <button type="button" class="small" aria-pressed={props.scale === "time"} onClick={() => props.setScale("time")}>time</button>
        </div>
        <button type="button" class="small" aria-label="Zoom out" title="Zoom out (-)" disabled={props.zoom <= 0}
          onClick={() => props.setZoom(props.zoom - 1)}>−</button>
        <button type="button" class="small" aria-label="Zoom in" title="Zoom in (+)" disabled={props.zoom >= ZOOMS.length - 1}
          onClick={() => props.setZoom(props.zoom + 1)}>+</button>
        </div>
      </div>
      <Overview {...props} index={index} />
    </section>
  );
}

/** Where each call begins and ends, from 0 to 1, on the chosen scale. */
function spans(calls: CallRow[], scale: Scale): [number, number][] {
  if (scale === "calls" || calls.length < 2) return calls.map((_, i) => [i / calls.length, (i + 1) / calls.length]);
  const start = calls[0]!.time;
  const end = Math.max(...calls.slice(-50).map((c) => c.time + c.duration), start + 0.001);
  return calls.map((c) => [(c.time - start) / (end - start), (c.time + c.duration - start) / (end - start)]);
}

function Overview({ calls, point, scrub, zoom, setZoom, scale, index }: Props & { index: number }) {
  const mini = useRef<HTMLCanvasElement>(null);
  const lanes = useRef<HTMLCanvasElement>(null);
  const [width, setWidth] = useState(0);
  const [theme, setTheme] = useState(0);

  useLayoutEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.floor(entry!.contentRect.width)));
    observer.observe(mini.current!.parentElement!);
    return () => observer.disconnect();
  }, []);
  useEffect(() => {
    const changed = () => setTheme((n) => n + 1);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", changed);
    addEventListener("theme", changed);
    return () => {
      dark.removeEventListener("change", changed);
      removeEventListener("theme", changed);
    };
  }, []);

  const all = useMemo(() => spans(calls, scale), [calls, scale]);
  const count = useMemo(() => Math.min(LANES, calls.reduce((n, c) => Math.max(n, c.lane), 0) + 1), [calls]);
  const high = laneHeight(count);
  const [from, to] = windowOf(all, index, ZOOMS[zoom]!);
  useLayoutEffect(() => {
    if (!width) return;
    const colours = palette(mini.current!);
    drawMini(paper(mini.current!, width, 18), width, calls, from, to, scale, all, colours);
    drawLanes(paper(lanes.current!, width, high * count), width, high, calls, all, from, to, index, colours);
  }, [all, index, width, zoom, theme]);

  const pick = (event: MouseEvent) => {
    const box = lanes.current!.getBoundingClientRect();
    const x = from + ((event.clientX - box.left) / box.width) * (to - from);
    const lane = Math.floor((event.clientY - box.top) / high);
    const near = nearest(all, x, (i) => Math.min(calls[i]!.lane, LANES - 1) === lane) ?? nearest(all, x, () => true);
    if (near !== undefined) scrub(calls[near]!.n);
  };
  const wheel = (event: WheelEvent) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    setZoom(Math.min(ZOOMS.length - 1, Math.max(0, zoom + (event.deltaY < 0 ? 1 : -1))));
  };
  const here = calls[index];
  return (
    <div class="strip-map">
      <canvas class="mini" ref={mini} aria-hidden="true" />
      <input class="scrubber" type="range" min={0} max={Math.max(0, calls.length - 1)} value={index} disabled={!calls.length}
        aria-label="Scrub along the run"
        aria-valuetext={here ? `Call ${here.n} of ${calls.length}, ${here.tool}, ${here.outcome}${point.before ? ", before it" : ""}` : "No calls"}
        onInput={(e) => {
          const call = calls[Number(e.currentTarget.value)];
          if (call) scrub(call.n);
        }} />
      <canvas class="lanes-canvas" ref={lanes} style={{ height: `${high * count}px` }} aria-hidden="true" onClick={pick} onWheel={wheel} />
    </div>
  );
}

function windowOf(all: [number, number][], index: number, zoom: number): [number, number] {
  const here = all[index];
  const size = 1 / zoom;
  const middle = here ? (here[0] + here[1]) / 2 : 0;
  const from = Math.min(1 - size, Math.max(0, middle - size / 2));
  return [from, from + size];
}

function nearest(all: [number, number][], x: number, fits: (i: number) => boolean): number | undefined {
  let best: number | undefined, least = Infinity;
  for (const [i, [a, b]] of all.entries()) {
    const away = x < a ? a - x : x > b ? x - b : 0;
    if (away < least && fits(i)) [best, least] = [i, away];
  }
  return best;
}

// Drawing

type Palette = (name: string) => string;

/** The colours of the theme, as a canvas understands them. */
function palette(probe: HTMLElement): Palette {
  const known: Record<string, string> = {};
  return (name) => {
    if (!known[name]) {
      probe.style.color = `var(--${name})`;
      known[name] = getComputedStyle(probe).color;
    }
    return known[name];
  };
}

function paper(canvas: HTMLCanvasElement, width: number, height: number): CanvasRenderingContext2D {
  const ratio = devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const ink = canvas.getContext("2d")!;
  ink.scale(ratio, ratio);
  ink.clearRect(0, 0, width, height);
  return ink;
}

/** The whole run in one row; problems stand out: they are higher. */
function drawMini(
  ink: CanvasRenderingContext2D, width: number, calls: CallRow[], from: number, to: number, scale: Scale,
  all: [number, number][], colour: Palette,
) {
  // A column of pixels may stand for many calls: a problem among them is what to see.
  const columns = new Map<number, CallRow>();
  for (const [i, call] of calls.entries()) {
    const x = Math.floor((i / calls.length) * width);
    const there = columns.get(x);
    if (!there || (isProblem(call) && !isProblem(there))) columns.set(x, call);
  }
  const wide = Math.max(1, width / Math.max(1, calls.length));
  for (const [x, call] of columns) {
    const problem = isProblem(call);
    ink.fillStyle = colour(slug(call.outcome));
    ink.fillRect(x, problem ? 1 : 6, wide - (wide > 3 ? 1 : 0), problem ? 16 : 6);
  }
  if (to - from > 0.999 || !calls.length) return;
  // What the lanes below show.
  const [a, b] = scale === "calls" ? [from, to] : [
    all.findIndex((s) => s[1] >= from) / calls.length, (all.findLastIndex((s) => s[0] <= to) + 1) / calls.length,
  ];
  ink.strokeStyle = colour("accent");
  ink.lineWidth = 1.5;
  ink.strokeRect(a * width + 0.75, 0.75, Math.max(4, (b - a) * width - 1.5), 16.5);
}

function drawLanes(
  ink: CanvasRenderingContext2D, width: number, lane: number, calls: CallRow[], all: [number, number][], from: number,
  to: number, index: number, colour: Palette,
) {
  const x = (value: number) => ((value - from) / (to - from)) * width;
  ink.font = "11px system-ui, sans-serif";
  ink.textBaseline = "middle";
  for (const [i, call] of calls.entries()) {
    const [a, b] = all[i]!;
    if (b < from || a > to) continue;
    const left = x(a);
    const wide = Math.max(1, x(b) - left - (x(b) - left > 4 ? 1 : 0));
    const top = Math.min(call.lane, LANES - 1) * lane + 2 + (call.nestedIn === null ? 0 : 4);
    const high = lane - 4 - (call.nestedIn === null ? 0 : 4);
    const tone = colour(slug(call.outcome));
    ink.fillStyle = tone;
    ink.strokeStyle = tone;
    // Shape beside colour: a call that changed something is full, a failed one hatched, the rest hollow.
    if (call.outcome === "committed" || wide < 4) ink.fillRect(left, top, wide, high);
    else if (isProblem(call)) hatch(ink, left, top, wide, high);
    else ink.strokeRect(left + 0.5, top + 0.5, wide - 1, high - 1);
    if (wide > 60) {
      ink.save();
      ink.beginPath();
      ink.rect(left, top, wide, high);
      ink.clip();
      const label = `${call.n} ${call.tool}`;
      if (call.outcome !== "committed") {
        ink.fillStyle = colour("surface");
        ink.fillRect(left + 3, top + 1, ink.measureText(label).width + 6, high - 2);
      }
      ink.fillStyle = call.outcome === "committed" ? colour("surface") : colour("text");
      ink.fillText(label, left + 6, top + high / 2 + 1);
      ink.restore();
    }
    if (i === index) {
      ink.strokeStyle = colour("text");
      ink.lineWidth = 2;
      ink.strokeRect(left - 1, top - 1, Math.max(4, wide + 2), high + 2);
      ink.lineWidth = 1;
    }
  }
}

function hatch(ink: CanvasRenderingContext2D, left: number, top: number, wide: number, high: number) {
  ink.save();
  ink.beginPath();
  ink.rect(left, top, wide, high);
  ink.stroke();
  ink.clip();
  for (let at = -high; at < wide; at += 5) {
    ink.beginPath();
    ink.moveTo(left + at, top + high);
    ink.lineTo(left + at + high, top);
    ink.stroke();
  }
  ink.restore();
}
