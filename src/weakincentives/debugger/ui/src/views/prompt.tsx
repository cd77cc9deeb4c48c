// The prompt and the tools as they were rendered for the model.

import { useState } from "preact/hooks";
import { useData } from "../data.ts";
import { diffLines } from "../model.ts";
import { count, Empty, Problem, Section } from "../parts/bits.tsx";
import { DiffLines } from "../parts/diff.tsx";
import { at } from "../source.ts";
import type { CallRow, Prompts, RunView } from "../types.ts";

export function PromptPanel({ view, call, version }: { view: RunView; call: CallRow | undefined; version: number }) {
  const { data, error } = useData<Prompts>(at.prompts(view.run.id), version);
  const [changes, setChanges] = useState(false);
  if (error) return <Problem text={error} />;
  if (!data) return null;
  const turn = call?.turn || view.turns.at(-1)?.n || 0;
  const index = data.prompts.findLastIndex((p) => p.turn <= Math.max(1, turn));
  const prompt = data.prompts[index];
  const earlier = data.prompts[index - 1];
  if (!prompt) return <Empty>No prompt is on record for this run.</Empty>;
  const parts = prompt.sections.length ? prompt.sections : [{ path: "", text: prompt.text }];
  return (
    <article aria-label="Prompt">
      <header class="call-head">
        <h2>Prompt</h2>
        <p class="facts">
          <span>rendered for turn {prompt.turn}, in force at turn {turn}</span>
          <span>{count(data.prompts.length, "rendering")} in this run</span>
          {earlier && (
            <button type="button" class="small" aria-pressed={changes} onClick={() => setChanges(!changes)}>Changes since turn {earlier.turn}</button>
          )}
        </p>
      </header>
      {changes && earlier && (
        <Section title="Changes"><DiffLines lines={diffLines(earlier.text.split("\n"), prompt.text.split("\n"))} label="Changes of the prompt" /></Section>
      )}
      <Section title="Tools" aside={prompt.tools.length || undefined}>
        {prompt.tools.length ? <ul class="tools">{prompt.tools.map((t) => <li key={t}><code>{t}</code></li>)}</ul> : <Empty>None.</Empty>}
      </Section>
      {parts.map((section) => (
        <details class="change" open key={section.path}>
          <summary><span class="path">{section.path || "Text"}</span></summary>
          <pre class="prose inset">{section.text}</pre>
        </details>
      ))}
    </article>
  );
}
