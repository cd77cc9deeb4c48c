// Syntax colours: a text as tokens, each with a class. The parsers recover from errors, so a piece of a file will do.

import { defineLanguageFacet, HighlightStyle, Language, syntaxHighlighting } from "@codemirror/language";
import type { Extension } from "@codemirror/state";
import { parser as css } from "@lezer/css";
import { parser as go } from "@lezer/go";
import { highlightCode, tagHighlighter, tags, type Tag } from "@lezer/highlight";
import { parser as javascript } from "@lezer/javascript";
import { parser as json } from "@lezer/json";
import { parser as python } from "@lezer/python";
import { parser as rust } from "@lezer/rust";
import { parser as yaml } from "@lezer/yaml";
import type { DiffLine, Span } from "../model.ts";

export type Token = [text: string, tone: string];

const LANGUAGES: [endings: string, Language["parser"]][] = [
  ["py pyi", python],
  ["js jsx mjs cjs", javascript.configure({ dialect: "jsx" })],
  ["ts tsx mts cts", javascript.configure({ dialect: "ts jsx" })],
  ["json ipynb", json], ["css", css], ["yaml yml", yaml],
  ["rs", rust], ["go", go],
];
const PARSERS = new Map(LANGUAGES.flatMap(([endings, parser]) => endings.split(" ").map((ending) => [ending, parser])));
const TONES: Record<string, Tag[]> = {
  keyword: [tags.keyword, tags.operatorKeyword, tags.modifier, tags.self, tags.atom, tags.bool, tags.null],
  string: [tags.string, tags.special(tags.string), tags.regexp, tags.attributeValue],
  number: [tags.number],
  comment: [tags.comment, tags.quote],
  name: [tags.function(tags.variableName), tags.function(tags.definition(tags.variableName)), tags.definition(tags.className),
    tags.typeName, tags.className, tags.tagName, tags.propertyName, tags.attributeName, tags.heading, tags.link],
};
const tones = Object.entries(TONES);
const HIGHLIGHTER = tagHighlighter(tones.map(([tone, tag]) => ({ tag, class: `tone-${tone}` })));
const STYLE = HighlightStyle.define(tones.map(([tone, tag]) => ({ tag, color: `var(--tone-${tone})` })));
const MOST = 300_000;

const parserOf = (path: string) => PARSERS.get(/\.(\w+)$/.exec(path)?.[1]?.toLowerCase() ?? "");

/** The lines of a text as tokens; nothing if the language is not known. */
export function colored(text: string, path: string): Token[][] | undefined {
  const parser = parserOf(path);
  if (!parser || text.length > MOST) return undefined;
  const lines: Token[][] = [[]];
  highlightCode(text, parser.parse(text), HIGHLIGHTER,
    (piece, tone) => lines.at(-1)!.push([piece, tone]),
    () => lines.push([]));
  return lines;
}

/** The same for the lines of a diff: each side of a hunk is a text of its own. */
export function coloredDiff(lines: DiffLine[], path: string): (Token[] | undefined)[] {
  const found: (Token[] | undefined)[] = [];
  if (!parserOf(path)) return found;
  const color = (places: number[], side: "+" | "-") => {
    const tokens = colored(places.map((i) => lines[i]!.text).join("\n"), path);
    places.forEach((place, k) => {
      if (side === "+" || lines[place]!.kind === "-") found[place] = tokens?.[k];
    });
  };
  for (let start = 0; start < lines.length;) {
    let end = start + 1;
    while (end < lines.length && lines[end]!.kind !== "@") end++;
    const hunk = Array.from({ length: end - start }, (_, i) => start + i).filter((i) => lines[i]!.kind !== "@");
    color(hunk.filter((i) => lines[i]!.kind !== "+"), "-");
    color(hunk.filter((i) => lines[i]!.kind !== "-"), "+");
    start = end;
  }
  return found;
}

/** Tokens with these parts marked. */
export function marked(tokens: Token[], spans: readonly Span[]): [text: string, tone: string, changed: boolean][] {
  const out: [string, string, boolean][] = [];
  let at = 0;
  for (const [text, tone] of tokens) {
    const end = at + text.length;
    const cuts = spans.flat().filter((cut) => cut > at && cut < end);
    let from = at;
    for (const cut of [...cuts, end]) {
      const inside = spans.some(([a, b]) => from >= a && from < b);
      out.push([text.slice(from - at, cut - at), tone, inside]);
      from = cut;
    }
    at = end;
  }
  return out;
}

/** What CodeMirror needs to colour a text. */
export function language(path: string): Extension {
  const parser = parserOf(path);
  return parser ? [new Language(defineLanguageFacet(), parser), syntaxHighlighting(STYLE)] : [];
}
