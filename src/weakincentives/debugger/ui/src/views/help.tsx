// The keys.

import { Dialog } from "../parts/dialog.tsx";
import { allKeys } from "../keys.ts";

const NAMES: Record<string, string> = { ArrowDown: "↓", ArrowUp: "↑", " ": "Space" };
const INSIDE: [string, string][] = [
  ["Tab", "Next control"], ["Enter", "In a file or slice: open the call that wrote the line"],
  ["↑ ↓ PgUp PgDn", "In a file, slice or tree: move"], ["← →", "In the tree: close, open a folder. On the scrubber: move"],
  ["Esc", "Close a dialog"],
];

export function Help({ close }: { close: () => void }) {
  const rows: [string[], string][] = [
    ...allKeys().map((s): [string[], string] => [s.keys.map((k) => NAMES[k] ?? k), s.does]),
    ...INSIDE.map(([keys, does]): [string[], string] => [[keys], does]),
  ];
  return (
    <Dialog title="Keys" close={close}>
      <ul class="keys">
        {rows.map(([keys, does]) => <li key={does}><span>{keys.map((k) => <kbd key={k}>{k}</kbd>)}</span><span>{does}</span></li>)}
      </ul>
    </Dialog>
  );
}
