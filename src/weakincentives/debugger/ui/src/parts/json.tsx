// JSON for people: a value per line, long texts as they are, validation errors in place.

import type { Traced } from "../model.ts";
import type { Line } from "./lines.tsx";

/** "steps[0].title", "steps.0.title" and "/steps/0/title" are one path. */
const normal = (path: string) => path.replace(/^\$|^arguments\b/, "").replace(/\[(\w+)\]/g, ".$1").replace(/\//g, ".")
  .replace(/["'\]]/g, "").replace(/^\./, "");

interface Props { value: unknown; problems?: Record<string, string> }

export function Json({ value, problems = {} }: Props) {
  const open = new Map(Object.entries(problems).map(([path, text]) => [normal(path), text]));
  const body = <Value value={value} path="" open={open} />;
  // What is left has no place in the value: a field is missing.
  return (
    <div class="json">
      {body}
      <Missing problems={problems} value={value} />
    </div>
  );
}

function find(value: unknown, path: string): boolean {
  if (!path) return true;
  let at: unknown = value;
  for (const step of path.split(".")) {
    if (typeof at !== "object" || at === null || !Object.hasOwn(at, step)) return false;
    at = (at as Record<string, unknown>)[step];
  }
  return true;
}

function Missing({ problems, value }: Required<Props>) {
  const missing = Object.entries(problems).filter(([path]) => !find(value, normal(path)));
  if (!missing.length) return null;
  return (
    <dl>
      {missing.map(([path, text]) => [
        <dt key={`${path}.`} class="wrong">{path}</dt>,
        <dd key={path}><em class="none">missing</em><Wrong text={text} /></dd>,
      ])}
    </dl>
  );
}

function Wrong({ text }: { text: string | undefined }) {
  return text ? <strong class="wrong-note">{text}</strong> : null;
}

function Value({ value, path, open }: { value: unknown; path: string; open: Map<string, string> }) {
  const wrong = open.get(path);
  const note = <Wrong text={wrong} />;
  if (typeof value === "string") {
    if (value.includes("\n") || value.length > 120) return <><pre class="text-block" tabIndex={0}>{value}</pre>{note}</>;
    return <><span class="string">{value === "" ? '""' : value}</span>{note}</>;
  }
  if (typeof value !== "object" || value === null) return <><span class="atom">{String(value)}</span>{note}</>;
  const entries = Object.entries(value);
  if (!entries.length) return <><span class="atom">{Array.isArray(value) ? "[]" : "{}"}</span>{note}</>;
  return (
    <>
      {note}
      <dl>
        {entries.map(([key, item]) => {
          const inner = path ? `${path}.${key}` : key;
          return [
            <dt key={`${key}.`} class={open.has(inner) ? "wrong" : ""}>{key}</dt>,
            <dd key={key}><Value value={item} path={inner} open={open} /></dd>,
          ];
        })}
      </dl>
    </>
  );
}

/** A slice's values as lines, each with the call that wrote it. */
export function tracedLines(values: Traced[]): Line[] {
  const found: Line[] = [];
  const put = (indent: number, text: string, call: number) =>
    found.push({ text: "  ".repeat(indent) + text, call: call || null, author: call ? `call ${call}` : "before the run" });
  const walk = (traced: Traced, indent: number, key: string, comma: string) => {
    const { value, call } = traced;
    if (typeof value === "object" && value !== null && Object.keys(value).length) {
      const list = Array.isArray(value);
      put(indent, key + (list ? "[" : "{"), call);
      const entries = Object.entries(value);
      for (const [i, [name, item]] of entries.entries()) {
        const inner = (list ? traced.items?.[i] : traced.fields?.[name]) ?? { value: item, call };
        walk(inner, indent + 1, list ? "" : `${JSON.stringify(name)}: `, i < entries.length - 1 ? "," : "");
      }
      put(indent, (list ? "]" : "}") + comma, call);
    } else put(indent, key + JSON.stringify(value) + comma, call);
  };
  for (const [i, traced] of values.entries()) walk(traced, 0, "", i < values.length - 1 ? "," : "");
  return found;
}
