// Search in what the model said, arguments, results and the contents of files.

import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { useData } from "../data.ts";
import { distinct } from "../model.ts";
import { count, Empty, Problem } from "../parts/bits.tsx";
import { at } from "../source.ts";
import type { CallRow, Hit, Hits, RunView } from "../types.ts";
import { FOUND, go } from "../url.ts";

const PLACES: [string, string][] = [["text", "model's text"], ["arguments", "arguments"], ["results", "results"], ["files", "files"]];

export function SearchPanel({ view, query, calls, shown, version }: {
  view: RunView; query: string; calls: Map<number, CallRow>; shown: Set<number> | null; version: number;
}) {
  const [typed, setTyped] = useState(query);
  const [places, setPlaces] = useState(PLACES.map((p) => p[0]));
  const sent = useRef(query);
  const send = (text: string) => {
    sent.current = text;
    go({ q: text }, "replace");
  };
  useEffect(() => {
    const timer = setTimeout(() => send(typed), 200);
    return () => clearTimeout(timer);
  }, [typed]);
  // Back and forward change it, too; what is being typed stays.
  useLayoutEffect(() => {
    if (query !== sent.current) setTyped((sent.current = query));
  }, [query]);
  const asked = query.trim() && places.length ? at.search(view.run.id, query, places) : null;
  const { data, error, loading } = useData<Hits>(asked, version);
  // The filters of the timeline hold here, too.
  const hits = distinct(data?.hits ?? []).filter((h) => !shown || (h.call !== null && shown.has(h.call)));
  return (
    <div class="search" role="search">
      <input id="search" type="search" aria-label="Search this run" placeholder="Search text, arguments, results and files"
        value={typed} onInput={(e) => setTyped(e.currentTarget.value)}
        onKeyDown={(e) => e.key === "Enter" && send(typed)} />
      <div class="checks" role="group" aria-label="Search in">
        {PLACES.map(([key, label]) => (
          <label key={key}>
            <input type="checkbox" checked={places.includes(key)}
              onChange={() => setPlaces(places.includes(key) ? places.filter((p) => p !== key) : [...places, key])} />
            {label}
          </label>
        ))}
      </div>
      {error && <Problem text={error} />}
      <p class="muted" aria-live="polite">
        {!asked ? "Type to search." : loading ? "Searching…"
          : `${count(hits.length, "match", "matches")}${data?.truncated ? ", cut: be more precise" : ""}${shown ? ", filtered" : ""}`}
      </p>
      {asked && !loading && !error && hits.length === 0 && <Empty>Nothing found.</Empty>}
      <ul class="hits">
        {hits.map((hit, i) => <li key={i}><HitItem hit={hit} call={hit.call === null ? undefined : calls.get(hit.call)} length={query.length} /></li>)}
      </ul>
    </div>
  );
}

const NAMES = { text: "model's text", arguments: "arguments", result: "result", file: "file" } as const;

function HitItem({ hit, call, length }: { hit: Hit; call: CallRow | undefined; length: number }) {
  const open = () => {
    const change = { call: call?.n ?? null, before: false };
    if (hit.where === "file") go({ ...change, panel: "files", path: hit.path, line: FOUND });
    else go({ ...change, panel: "call" });
  };
  const { excerpt, at: start } = hit;
  return (
    <button type="button" class="hit" onClick={open}>
      <span class="hit-head">
        {call ? <b>#{call.n} {call.tool}</b> : <b>{hit.serial === null ? "before the run" : "at the end"}</b>}
        <span class="muted">{hit.where === "file" ? hit.path : NAMES[hit.where]}</span>
      </span>
      <span class="excerpt">{excerpt.slice(0, start)}<mark>{excerpt.slice(start, start + length)}</mark>{excerpt.slice(start + length)}</span>
    </button>
  );
}
