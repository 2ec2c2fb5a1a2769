import { h } from "./dom";
import type { Row } from "./types";

const WORDS: Record<string, string> = {
  running: "a live process holds the run folder",
  finished: "it ended as it should",
  failed: "it ended with an error",
  stopped: "somebody stopped it",
  lost: "its launcher died without a word",
};

export function status(row: { status: string; exit_code?: number | null }): HTMLElement {
  const known = row.status in WORDS ? row.status : "unknown";
  const code = row.exit_code ? ` (${row.exit_code})` : "";
  return h("span", { class: `status ${known}`, title: WORDS[row.status] }, row.status + code);
}

export function workers(row: Row): string {
  if (row.workers === null) return "–";
  return row.max_workers !== null ? `${row.workers} of ${row.min_workers}:${row.max_workers}` : String(row.workers);
}

export function steps(row: Row): string {
  if (row.items) return row.items[1] === null ? `${row.items[0]} items` : `${row.items[0]}/${row.items[1]} items`;
  return row.step === null ? "–" : row.step.toLocaleString("en-US");
}
