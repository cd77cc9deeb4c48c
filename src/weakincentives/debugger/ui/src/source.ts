// Where the data comes from: the server of a live page, or what an export has embedded. `get` takes
// the same paths in both, so that the views cannot tell the difference.

import { compareWorlds, fileAt, search, serialAt, touched, type Point } from "./model.ts";
import type {
  Approval, CallView, Comparison, FileView, Hits, RunSummary, RunView, SliceHistory, Tree, Versions, Where,
  Workspace,
} from "./types.ts";

export interface Events {
  runs?: (runs: RunSummary[]) => void;
  approvals?: (approvals: Approval[]) => void;
  connected?: (connected: boolean) => void;
}

export interface Source {
  live: boolean;
  /** What an export says of itself: what was left out. */
  note: string;
  /** The run of an export. */
  only: string;
  get<T>(path: string): Promise<T>;
  post<T>(path: string, body: unknown): Promise<T>;
  listen(events: Events): () => void;
}

// The paths. Names that are not Unicode come with lone surrogates, which cannot be encoded as they are.

const q = (text: string) => encodeURIComponent(text.toWellFormed());
export const at = {
  workspace: "workspace",
  run: (run: string, after = 0) => `runs/${q(run)}${after ? `?after=${after}` : ""}`,
  call: (run: string, n: number) => `runs/${q(run)}/calls/${n}`,
  tree: (run: string) => `runs/${q(run)}/tree`,
  file: (run: string, serial: number, path: string) => `runs/${q(run)}/file?serial=${serial}&path=${q(path)}`,
  versions: (run: string, path: string) => `runs/${q(run)}/versions?path=${q(path)}`,
  slices: (run: string, key: string) => `runs/${q(run)}/slices?key=${q(key)}`,
  prompts: (run: string) => `runs/${q(run)}/prompts`,
  search: (run: string, text: string, where: string[]) =>
    `runs/${q(run)}/search?q=${q(text)}${where.length ? `&in=${where.join(",")}` : ""}`,
  compare: (a: [string, Point], b: [string, Point]) =>
    `compare?a=${q(`${a[0]}/${a[1].call}`)}&b=${q(`${b[0]}/${b[1].call}`)}`
    + (a[1].before ? "&before_a=1" : "") + (b[1].before ? "&before_b=1" : ""),
};

class Served implements Source {
  live = true;
  note = "";
  only = "";

  async get<T>(path: string): Promise<T> {
    return this.answer(await fetch(`api/${path}`, { headers: { Accept: "application/json" } }));
  }

  async post<T>(path: string, body: unknown): Promise<T> {
    const headers = { "Content-Type": "application/json", Accept: "application/json" };
    return this.answer(await fetch(`api/${path}`, { method: "POST", headers, body: JSON.stringify(body) }));
  }

  private async answer<T>(response: Response): Promise<T> {
    const text = await response.text();
    if (response.ok) return JSON.parse(text) as T;
    let error = text;
    try {
      error = (JSON.parse(text) as { error: string }).error;
    } catch {
      // Not JSON: the text is the message.
    }
    throw new Error(error || `${response.status} ${response.statusText}`);
  }

  listen(events: Events): () => void {
    const stream = new EventSource("api/events");
    const on = <T>(name: string, take?: (data: T) => void) =>
      take && stream.addEventListener(name, (e) => take(JSON.parse((e as MessageEvent<string>).data) as T));
    on("runs", events.runs);
    on("approvals", events.approvals);
    on("changed", () => dispatchEvent(new Event("changed")));
    stream.onopen = () => events.connected?.(true);
    stream.onerror = () => events.connected?.(false);
    return () => stream.close();
  }
}

interface Data { version: number; run: string; note: string; index: Record<string, number>; blocks: string[] }
type Block = Record<string, unknown>;

class Embedded implements Source {
  live = false;
  private blocks = new Map<number, Promise<Block>>();
  private index: Map<string, number>;

  constructor(private data: Data) {
    if (data.version !== 1) throw new Error(`This page cannot read data of version ${data.version}`);
    this.index = new Map(Object.entries(data.index));
  }

  get note(): string {
    return this.data.note;
  }

  get only(): string {
    return this.data.run;
  }

  private async unpack(n: number): Promise<Block> {
    const packed = atob(this.data.blocks[n] ?? "");
    const bytes = new Uint8Array(packed.length);
    for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
    const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return (await new Response(plain).json()) as Block;
  }

  private block(n: number): Promise<Block> {
    const known = this.blocks.get(n) ?? this.unpack(n);
    this.blocks.set(n, known);
    return known;
  }

  async get<T>(path: string): Promise<T> {
    const n = this.index.get(path);
    if (n !== undefined) return (await this.block(n))[path] as T;
    const url = new URL(path, "http://page/");
    const run = this.only;
    if (path === at.workspace) return (await this.workspace()) as T;
    if (url.pathname.endsWith("/file")) return (await this.file(run, url.searchParams)) as T;
    if (url.pathname.endsWith("/search")) return (await this.search(url.searchParams)) as T;
    if (url.pathname === "/compare") return (await this.compare(run, url.searchParams)) as T;
    throw new Error("This export does not contain it");
  }

  private async workspace(): Promise<Workspace> {
    const view = await this.get<RunView>(at.run(this.only));
    return { name: "", path: "", writable: false, runs: [view.run], branches: [], approvals: [] };
  }

  private async file(run: string, query: URLSearchParams): Promise<FileView> {
    const [path, serial] = [query.get("path") ?? "", Number(query.get("serial"))];
    const file = fileAt(await this.get<Versions>(at.versions(run, path)), serial);
    const text = file.exists ? file.lines.join("") : null;
    return { path, serial, exists: file.exists, text, note: file.note, size: text?.length ?? 0 };
  }

  /** All values below a part of the paths, in the order of the index. */
  private async all<T>(part: string): Promise<T[]> {
    const paths = [...this.index.keys()].filter((p) => p.startsWith(`runs/${this.only}/${part}`));
    return Promise.all(paths.map((p) => this.get<T>(p)));
  }

  private async search(query: URLSearchParams): Promise<Hits> {
    const where = (query.get("in") ?? "text,arguments,results,files").split(",").map((w) => w.replace(/(result|file)s$/, "$1"));
    const calls = (await this.all<CallView>("calls/")).sort((a, b) => a.n - b.n);
    return search(query.get("q") ?? "", new Set(where as Where[]), calls, await this.all<Versions>("versions"));
  }

  private async compare(run: string, query: URLSearchParams): Promise<Comparison> {
    const point = (side: "a" | "b"): Point => ({
      call: Number(query.get(side)?.split("/")[1]), before: query.has(`before_${side}`),
    });
    const [tree, view, histories] = await Promise.all([
      this.get<Tree>(at.tree(run)), this.get<RunView>(at.run(run)), this.all<SliceHistory>("slices"),
    ]);
    const [a, b] = [point("a"), point("b")];
    const serials = [serialAt(view, a), serialAt(view, b)];
    const changed = [...touched(view.commits, Math.min(...serials), Math.max(...serials)).keys()];
    const files = await Promise.all(changed.map((path) => this.get<Versions>(at.versions(run, path)).catch(() => undefined)));
    const versions = new Map(changed.map((path, i) => [path, files[i]]));
    return compareWorlds(tree, view, histories, (path) => versions.get(path), a, b);
  }

  post<T>(): Promise<T> {
    return Promise.reject(new Error("An export cannot change anything"));
  }

  listen(): () => void {
    return () => undefined;
  }
}

function open(): Source {
  const embedded = document.getElementById("wink-data")?.textContent;
  return embedded ? new Embedded(JSON.parse(embedded) as Data) : new Served();
}

export const source = open();
