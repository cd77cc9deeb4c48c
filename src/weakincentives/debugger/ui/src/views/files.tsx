// The files at a point: the tree, any file, and for any line the call that wrote it.

import { useEffect, useMemo, useState } from "preact/hooks";
import { useData } from "../data.ts";
import { asFolders, author, fileAt, serialAt, splitLines, touched, treeAt, type Folder, type Point } from "../model.ts";
import { count, Empty, Problem } from "../parts/bits.tsx";
import { Lines, type Line } from "../parts/lines.tsx";
import { Virtual } from "../parts/virtual.tsx";
import { at, source } from "../source.ts";
import type { CallRow, Commit, FileView, RunView, Tree, Versions } from "../types.ts";
import { FOUND, go, type Place } from "../url.ts";
import { BlameCard } from "./blame.tsx";

export function FilesPanel({ view, place, point, calls, version }: {
  view: RunView; place: Place; point: Point; calls: Map<number, CallRow>; version: number;
}) {
  const tree = useData<Tree>(at.tree(view.run.id));
  const serial = serialAt(view, point);
  const here = calls.get(point.call);
  const paths = useMemo(() => (tree.data ? treeAt(tree.data, view.commits, serial) : []), [tree.data, view.commits, serial]);
  const changed = useMemo(() => touched(view.commits, view.base, serial), [view.commits, serial]);
  const now = useMemo(
    () => new Set(here && !point.before ? touched(view.commits, here.before, here.after).keys() : []),
    [view.commits, here, point.before],
  );
  if (serial < 0) return <div class="world-main"><Empty>{view.note || "The files at this call are not known."}</Empty></div>;
  const open = place.path || [...now][0] || [...changed.keys()].at(-1) || "";
  return (
    <div class="world">
      <div class="world-side">
        {tree.error ? <Problem text={tree.error} />
          : <FileTree paths={paths} changed={changed} now={now} open={open} loading={tree.loading} />}
        {tree.data?.truncated && <p class="note">Too many files: the tree is cut.</p>}
      </div>
      <div class="world-main">
        {open
          ? <FileAt key={open} view={view} path={open} serial={serial} place={place} point={point} calls={calls} version={version} />
          : <Empty>{tree.loading ? "" : "No call has changed a file yet. Choose one in the tree."}</Empty>}
      </div>
    </div>
  );
}

type Item = { folder: Folder; depth: number } | { path: string; name: string; depth: number };

function flatten(folder: Folder, depth: number, isOpen: (path: string) => boolean, into: Item[]): Item[] {
  for (const inner of folder.folders) {
    into.push({ folder: inner, depth });
    if (isOpen(inner.path)) flatten(inner, depth + 1, isOpen, into);
  }
  for (const file of folder.files) into.push({ ...file, depth });
  return into;
}

const ROW = 24;

function FileTree({ paths, changed, now, open, loading }: {
  paths: string[]; changed: Map<string, Commit>; now: Set<string>; open: string; loading: boolean;
}) {
  const [wanted, setWanted] = useState("");
  const [toggled, setToggled] = useState<Map<string, boolean>>(new Map());
  const [cursor, setCursor] = useState(-1);
  const shown = useMemo(() => {
    const text = wanted.toLowerCase();
    return text ? paths.filter((p) => p.toLowerCase().includes(text)) : paths;
  }, [paths, wanted]);
  const root = useMemo(() => asFolders(shown), [shown]);
  // Folders open by themselves when they are few, or lead to a changed or open file.
  const leads = useMemo(() => {
    const found = new Set<string>();
    for (const path of [...changed.keys(), open])
      for (let cut = path.indexOf("/"); cut > 0; cut = path.indexOf("/", cut + 1)) found.add(path.slice(0, cut));
    return found;
  }, [changed, open]);
  const isOpen = (path: string) => toggled.get(path) ?? (wanted !== "" || leads.has(path) || paths.length < 60);
  const items = useMemo(() => flatten(root, 0, isOpen, []), [root, leads, toggled]);
  const chosen = items.findIndex((item) => "path" in item && item.path === open);
  useEffect(() => setCursor(chosen), [chosen]);
  const toggle = (path: string, to = !isOpen(path)) => setToggled(new Map(toggled).set(path, to));
  const choose = (path: string) => go({ panel: "files", path, line: 0 });

  const onKey = (event: KeyboardEvent) => {
    const item = items[cursor];
    const folder = item && "folder" in item ? item.folder : undefined;
    if (event.key === "ArrowDown") setCursor(Math.min(items.length - 1, cursor + 1));
    else if (event.key === "ArrowUp") setCursor(Math.max(0, cursor - 1));
    else if (event.key === "ArrowRight" && folder) toggle(folder.path, true);
    else if (event.key === "ArrowLeft" && folder) toggle(folder.path, false);
    else if (event.key === "Enter" || event.key === " ") {
      if (folder) toggle(folder.path);
      else if (item && "path" in item) choose(item.path);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  };
  return (
    <>
      <input type="search" class="tree-filter" aria-label="Find a file" placeholder="Find a file" value={wanted}
        onInput={(e) => setWanted(e.currentTarget.value)} />
      <Virtual class="tree" role="tree" label="Files" count={items.length} rowHeight={ROW} active={cursor}
        activeId={cursor >= 0 ? `tree-${cursor}` : undefined} onKeyDown={onKey}
        empty={<Empty>{loading ? "" : wanted ? "No file matches." : "No files here."}</Empty>}
        render={(i) => {
          const item = items[i]!;
          const indent = { paddingLeft: `${item.depth * 14 + 8}px` };
          if ("folder" in item) {
            const { path, name } = item.folder;
            return (
              <div key={`${path}/`} id={`tree-${i}`} role="treeitem" aria-expanded={isOpen(path)} aria-level={item.depth + 1}
                class={`tree-row ${i === cursor ? "cursor" : ""}`} style={indent} onClick={() => toggle(path)}>
                <span class={`fold ${isOpen(path) ? "open" : ""}`} aria-hidden="true" />{name}/
              </div>
            );
          }
          const mark = now.has(item.path) ? "now" : changed.has(item.path) ? "changed" : "";
          return (
            <div key={item.path} id={`tree-${i}`} role="treeitem" aria-level={item.depth + 1} aria-selected={item.path === open}
              class={`tree-row file ${mark} ${item.path === open ? "chosen" : ""} ${i === cursor ? "cursor" : ""}`} style={indent}
              title={item.path} onClick={() => choose(item.path)}>
              <span class="name">{item.name}</span>
              {mark && <span class="mark">{mark === "now" ? "this call" : "changed"}</span>}
            </div>
          );
        }} />
    </>
  );
}

function FileAt({ view, path, serial, place, point, calls, version }: {
  view: RunView; path: string; serial: number; place: Place; point: Point; calls: Map<number, CallRow>; version: number;
}) {
  const run = view.run.id;
  const versions = useData<Versions>(at.versions(run, path), version);
  // The text comes before the blame when the file has a long history.
  const plain = useData<FileView>(source.live && !versions.data ? at.file(run, serial, path) : null);
  const file = useMemo(() => (versions.data ? fileAt(versions.data, serial) : undefined), [versions.data, serial]);
  const lines = useMemo((): Line[] => {
    if (file && versions.data)
      return file.lines.map((text, i) => {
        const step = versions.data!.steps[file.by[i]!];
        return { text, call: step?.call ?? null, author: author(step) };
      });
    return splitLines(plain.data?.text ?? "").map((text) => ({ text, call: null, author: "" }));
  }, [file, versions.data, plain.data]);
  const exists = file?.exists ?? plain.data?.exists;
  const steps = versions.data?.steps.filter((s) => s.call !== null) ?? [];
  const error = versions.error && !plain.data ? versions.error : "";
  const note = file?.note || plain.data?.note || "";
  const chosen = lines[place.line - 1];
  useEffect(() => {
    if (place.line !== FOUND || !file) return;
    const wanted = place.q.toLowerCase();
    go({ line: lines.findIndex((l) => l.text.toLowerCase().includes(wanted)) + 1 }, "replace");
  }, [file, lines, place.line]);
  return (
    <>
      <header class="file-head">
        <h2 class="path" title={path}>{path}</h2>
        {file && file.exists && file.path !== path && <p class="note">At this point it is {file.path}.</p>}
        <p class="facts">
          <span>{point.before ? "before" : "after"} call {point.call}</span>
          {exists && <span>{count(lines.length, "line")}</span>}
          <Visits steps={steps} call={point.call} />
        </p>
      </header>
      {error && <Problem text={error} />}
      {note && <p class="note">{note}</p>}
      {exists === false && !note && <Empty>This file does not exist at this point.</Empty>}
      {exists && lines.length === 0 && !note && <Empty>This file is empty.</Empty>}
      {lines.length > 0 && (
        <Lines path={path} lines={lines} calls={calls} chosen={Math.max(0, place.line)} now={point.before ? -1 : point.call} label={`${path}, each line with the call that wrote it`}
          choose={(line) => go({ path, line }, "replace")} open={(call) => go({ call, before: false, panel: "call" })} />
      )}
      {chosen && versions.data && (
        <BlameCard run={run} what={`Line ${place.line}`} line={chosen} calls={calls} view={view} />
      )}
    </>
  );
}

/** The calls that changed this file, to step through. */
function Visits({ steps, call }: { steps: { call: number | null }[]; call: number }) {
  const numbers = [...new Set(steps.map((s) => s.call!))];
  const before = numbers.filter((n) => n < call).at(-1);
  const after = numbers.find((n) => n > call);
  return (
    <span class="visits">
      <span>changed by {count(numbers.length, "call")}</span>
      <button type="button" class="small" disabled={before === undefined} title="Previous change of this file ([)" data-visit="previous"
        onClick={() => go({ call: before!, before: false })}>‹ {before === undefined ? "none" : `#${before}`}</button>
      <button type="button" class="small" disabled={after === undefined} title="Next change of this file (])" data-visit="next"
        onClick={() => go({ call: after!, before: false })}>{after === undefined ? "none" : `#${after}`} ›</button>
    </span>
  );
}
