// Data for components: what a path answers, remembered, so that scrubbing back asks for nothing twice.

import { useEffect, useState } from "preact/hooks";
import { source } from "./source.ts";

export interface Loaded<T> { data: T | undefined; error: string; loading: boolean }

const KEPT = 400;
const known = new Map<string, { data?: unknown; promise?: Promise<unknown> }>();

function ask(path: string): Promise<unknown> {
  const promise = source.get(path);
  known.set(path, { promise });
  if (known.size > KEPT) known.delete(known.keys().next().value as string);
  promise.then(
    (data) => known.get(path)?.promise === promise && known.set(path, { data }),
    () => known.get(path)?.promise === promise && known.delete(path),
  );
  return promise;
}

/** Forget what begins so: it has changed. */
export function forget(prefix: string): void {
  for (const path of [...known.keys()]) if (path.startsWith(prefix)) known.delete(path);
}

async function fetchOnce<T>(path: string): Promise<T> {
  const there = known.get(path);
  if (there && "data" in there) return there.data as T;
  return (await (there?.promise ?? ask(path))) as T;
}

/** What `path` answers; null asks for nothing. While `version` changes, the old answer stays until the new one is there. */
export function useData<T>(path: string | null, version: number | string = 0): Loaded<T> {
  const there = path === null ? undefined : known.get(path);
  const ready = there && "data" in there;
  const [state, set] = useState<{ path: string | null; data?: T; error: string }>({ path: null, error: "" });
  useEffect(() => {
    if (path === null) return;
    let wanted = true;
    fetchOnce<T>(path).then(
      (data) => wanted && set({ path, data, error: "" }),
      (error: Error) => wanted && set({ path, error: error.message }),
    );
    return () => {
      wanted = false;
    };
  }, [path, version]);
  if (path === null) return { data: undefined, error: "", loading: false };
  if (ready) return { data: there.data as T, error: "", loading: false };
  if (state.path === path) return { data: state.data, error: state.error, loading: false };
  return { data: undefined, error: "", loading: true };
}
