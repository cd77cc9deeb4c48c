// The keyboard: one list that both works the keys and fills the help.

import { useLayoutEffect } from "preact/hooks";

export interface Shortcut { keys: string[]; does: string; run: () => void }

const isTyping = (target: EventTarget | null): boolean =>
  target instanceof HTMLElement
  && (target.isContentEditable || target instanceof HTMLTextAreaElement || target instanceof HTMLSelectElement
    || (target instanceof HTMLInputElement && !["range", "checkbox", "radio"].includes(target.type)));

/** Where the keys come from: CodeMirror's text is in a shadow root. */
const origin = (event: KeyboardEvent) => event.composedPath()[0] ?? event.target;

const inForce = new Set<Shortcut[]>();

/** Every key that does something now, for the help. */
export const allKeys = (): Shortcut[] => [...inForce].sort((a, b) => order.get(b)! - order.get(a)!).flat();
const order = new WeakMap<Shortcut[], number>();

/** Keys of an inner view come first in the help. */
export function useKeys(shortcuts: Shortcut[], depth = 0): void {
  // Not later: the next key may come at once.
  useLayoutEffect(() => {
    inForce.add(shortcuts);
    order.set(shortcuts, depth);
    const onKey = (event: KeyboardEvent) => {
      if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
      if (isTyping(origin(event)) || document.querySelector("dialog[open]")) return;
      if (event.target instanceof HTMLInputElement && event.key.startsWith("Arrow")) return;
      const found = shortcuts.find((s) => s.keys.includes(event.key));
      if (!found) return;
      event.preventDefault();
      found.run();
    };
    addEventListener("keydown", onKey);
    return () => {
      inForce.delete(shortcuts);
      removeEventListener("keydown", onKey);
    };
  });
}

/** Text for screen readers about what has just happened. */
export function say(text: string): void {
  const region = document.getElementById("news");
  if (region) region.textContent = text;
}
