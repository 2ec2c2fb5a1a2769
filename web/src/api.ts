// Asking the server, and hearing from it.

export class Failure extends Error {
  constructor(readonly status: number, message: string, readonly why = "", readonly hint = "") {
    super(message);
  }
}

const TRIES = "`shoal dash` may have ended; look at its terminal";

export async function ask<T>(path: string, params: Record<string, unknown> = {}, signal?: AbortSignal): Promise<T> {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    if (Array.isArray(value)) for (const each of value) query.append(name, String(each));
    else if (value !== null && value !== undefined && value !== "") query.set(name, String(value));
  }
  const text = query.toString();
  return read<T>(() => fetch(`/api/${path}${text ? `?${text}` : ""}`, { signal, cache: "no-store" }));
}

export async function post<T>(path: string, body: unknown = {}): Promise<T> {
  const options = { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
  return read<T>(() => fetch(`/api/${path}`, options));
}

async function read<T>(send: () => Promise<Response>): Promise<T> {
  let response: Response;
  try {
    response = await send();
  } catch (error) {
    if ((error as Error).name === "AbortError") throw error;
    throw new Failure(0, "The server does not answer.", "", TRIES);
  }
  const value = await response.json().catch(() => null);
  if (response.ok && value !== null) return value as T;
  const told = value?.error ?? {};
  if (response.status === 401 && location.pathname !== "/login") location.assign("/login");
  throw new Failure(response.status, told.message ?? `The server answered with ${response.status}.`, told.why, told.hint);
}

/** What may be watched beside single runs: the list of runs, the machines of all that go on, the queue. */
type Also = "list" | "system" | "jobs";

export type News = { onRun?: (id: string, changed: string[]) => void; onAlso?: () => void; onState: (isLive: boolean) => void };

/** News of runs, and of something else, while the page is visible. Hidden pages hang up: browsers allow six connections. */
export class Live {
  private source: EventSource | null = null;

  constructor(private readonly runs: string[], private readonly also: Also | null, private readonly news: News) {
    document.addEventListener("visibilitychange", this.look);
    this.look();
  }

  close(): void {
    document.removeEventListener("visibilitychange", this.look);
    this.source?.close();
    this.source = null;
  }

  private readonly look = (): void => {
    if (document.hidden) {
      this.source?.close();
      this.source = null;
    } else if (this.source === null) {
      this.open();
    }
  };

  private open(): void {
    const query = new URLSearchParams(this.runs.map((id) => ["run", id]));
    if (this.also) query.set("also", this.also);
    const source = new EventSource(`/api/news?${query}`);
    this.source = source;
    source.addEventListener("hello", () => {
      this.news.onState(true);
      // From now on news come; what changed between the last reading and now was not told.
      this.refreshAll();
    });
    source.addEventListener("run", (event) => {
      const { id, changed } = JSON.parse((event as MessageEvent<string>).data) as { id: string; changed: string[] };
      this.news.onRun?.(id, changed);
    });
    if (this.also) source.addEventListener(this.also, () => this.news.onAlso?.());
    source.addEventListener("error", () => {
      this.news.onState(false);
      if (source.readyState === EventSource.CLOSED && this.source === source) {
        this.source = null;
        window.setTimeout(this.look, 2000);
      }
    });
  }

  private refreshAll(): void {
    for (const id of this.runs) this.news.onRun?.(id, ["status", "series", "events", "logs", "system", "checkpoints"]);
    this.news.onAlso?.();
  }
}
