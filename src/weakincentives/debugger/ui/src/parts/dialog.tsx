// A modal dialog: the browser keeps the focus inside, and Escape closes it.

import type { ComponentChildren } from "preact";
import { useEffect, useRef } from "preact/hooks";

export function Dialog({ title, close, children }: { title: string; close: () => void; children: ComponentChildren }) {
  const node = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    const before = document.activeElement;
    node.current?.showModal();
    return () => before instanceof HTMLElement && before.isConnected && before.focus();
  }, []);
  // At once: the browser tells of a closed dialog later, maybe after the next key has opened another.
  const cancel = (event: Event) => {
    event.preventDefault();
    close();
  };
  return (
    <dialog ref={node} aria-labelledby="dialog-title" onCancel={cancel} onClose={close}
      onClick={(e) => e.target === node.current && close()}>
      <div class="dialog">
        <header>
          <h2 id="dialog-title">{title}</h2>
          <button type="button" class="small" aria-label="Close" onClick={close}>✕</button>
        </header>
        {children}
      </div>
    </dialog>
  );
}
