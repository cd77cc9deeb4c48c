// A list of rows of one height that draws only those in sight: 10,000 rows cost as much as 50.

import type { ComponentChildren, RefObject } from "preact";
import { useLayoutEffect, useRef, useState } from "preact/hooks";

interface Props {
  count: number;
  rowHeight: number;
  render: (index: number) => ComponentChildren;
  /** The row to keep in sight; -1: none. */
  active: number;
  label: string;
  class?: string;
  id?: string;
  /** The id of the active row, for screen readers. */
  activeId?: string;
  onKeyDown?: (event: KeyboardEvent) => void;
  role?: "listbox" | "tree";
  holder?: RefObject<HTMLDivElement | null>;
  /** Where to put the active row when it is out of sight. */
  align?: "near" | "middle";
  empty?: ComponentChildren;
}

const MORE = 8;

export function Virtual(props: Props) {
  const own = useRef<HTMLDivElement>(null);
  const holder = props.holder ?? own;
  const [top, setTop] = useState(0);
  const [height, setHeight] = useState(800);

  useLayoutEffect(() => {
    const node = holder.current;
    if (!node) return;
    const observer = new ResizeObserver(() => setHeight(node.clientHeight));
    observer.observe(node);
    setHeight(node.clientHeight);
    return () => observer.disconnect();
  }, []);

  useLayoutEffect(() => {
    const node = holder.current;
    if (!node || props.active < 0) return;
    const [start, end] = [props.active * props.rowHeight, (props.active + 1) * props.rowHeight];
    const away = start < node.scrollTop || end > node.scrollTop + node.clientHeight;
    if (!away) return;
    const far = end < node.scrollTop || start > node.scrollTop + node.clientHeight;
    if (far || props.align === "middle") node.scrollTop = start - (node.clientHeight - props.rowHeight) / 2;
    else node.scrollTop = start < node.scrollTop ? start : end - node.clientHeight;
    setTop(node.scrollTop);
  }, [props.active, props.count, height]);

  const first = Math.max(0, Math.floor(top / props.rowHeight) - MORE);
  const last = Math.min(props.count, Math.ceil((top + height) / props.rowHeight) + MORE);
  const drawn: ComponentChildren[] = [];
  for (let i = first; i < last; i++) drawn.push(props.render(i));
  return (
    <div ref={holder} id={props.id} class={`virtual ${props.class ?? ""}`} tabIndex={0} role={props.role ?? "listbox"}
      aria-label={props.label} aria-activedescendant={props.activeId} onKeyDown={props.onKeyDown}
      onScroll={(e) => setTop(e.currentTarget.scrollTop)}>
      {props.count === 0 && props.empty}
      <div class="virtual-all" role="presentation" style={{ height: `${props.count * props.rowHeight}px` }}>
        <div class="virtual-drawn" role="presentation" style={{ transform: `translateY(${first * props.rowHeight}px)` }}>{drawn}</div>
      </div>
    </div>
  );
}
