// The queue of the service: jobs, nodes, people and their shares.

import { Live, ask } from "./api";
import { type Child, bdi, empty, failure, fill, gentle, h, loading, prose } from "./dom";
import { clock, count, duration, gib, number, percent } from "./format";
import type { View } from "./types";

type Job = {
  job: number; name: string; owner: string; state: string; why: string; message: string; position: number; eta_seconds: number | null;
  workers: number; min_workers: number; max_workers: number; is_elastic: boolean; class: string; priority: number; partition: string;
  nodes: Record<string, number>; waited_seconds: number; run_seconds: number; submitted: number; index: number | null; run: string; step: number | null;
};
type Node = {
  node: string; is_alive: boolean; is_draining: boolean; why_draining: string; partition: string; kind: string; cores: number; free_cores: number;
  memory_bytes: number; free_memory_bytes: number; gpus: number; free_gpus: number; jobs: { job: number; owner: string; workers: number }[];
};
type Person = { person: string; role: string; account: string; num_jobs: number; max_jobs: number | null; num_workers: number; max_workers: number | null };
type Share = { person: string; account: string; weight: number; part: number; lately: number; worker_seconds: number };
type Told = {
  is_up: boolean; error?: { message: string; why: string; hint: string }; total: number; counts: Record<string, number>; jobs: Job[]; policy: string;
  problems: Record<string, string>; nodes: Node[]; people: Person[]; shares: Share[]; half_life_seconds: number; me: string; role: string;
};

const STATES = ["running", "waiting", "held", "starting", "stopping", "finished", "failed", "cancelled"];
const TONES: Record<string, string> = { running: "running", starting: "running", finished: "finished", failed: "failed", cancelled: "stopped", stopping: "stopped" };

export function showJobs(root: HTMLElement, onState: (isLive: boolean) => void): View {
  const state = { search: "", state: "", all: "" };
  const search = h("input", { type: "search", placeholder: "Search jobs and people", "aria-label": "Search jobs" });
  search.addEventListener("input", () => change({ search: search.value }));
  const chips = h("div", { class: "chips", role: "group", "aria-label": "State" });
  const ended = h("input", { type: "checkbox" });
  ended.addEventListener("change", () => change({ all: ended.checked ? "1" : "" }));
  const tools = h("div", { class: "tools", hidden: true }, search, chips, h("label", null, ended, " also those that are over"));
  const about = h("p", { class: "quiet small", role: "status" });
  const list = h("div", null, loading("the queue"));
  const rest = h("div", { class: "stack" });
  const all = h("div", { class: "stack" }, list, rest);
  fill(root, h("div", { class: "head head-row" }, h("h1", null, "Queue"), about), tools, all);

  function change(some: Partial<typeof state>): void {
    Object.assign(state, some);
    refresh();
  }

  const refresh = gentle(async () => {
    try {
      draw(await ask<Told>("jobs", state));
    } catch (error) {
      fill(list, failure(error));
    }
  }, 300);

  function draw(told: Told): void {
    tools.hidden = !told.is_up;
    if (!told.is_up) {
      about.textContent = "";
      fill(rest);
      fill(list, told.error ? failure(told.error) : empty("No service is up on this machine.", h("span", null, "Start one with ", h("code", null, "shoal up"), "; its queue appears here.")));
      root.dataset.drawn = "none";
      return;
    }
    about.textContent = `${count(told.total)} ${told.total === 1 ? "job" : "jobs"}, policy ${told.policy}; you are ${told.me} (${told.role})`;
    fill(chips, ...STATES.filter((name) => told.counts[name] || state.state === name).map((name) =>
      h("button", { type: "button", class: "small", "aria-pressed": String(state.state === name), "data-focus": `state-${name}`, onclick: () => change({ state: state.state === name ? "" : name }) }, `${name} ${count(told.counts[name] ?? 0)}`)));
    const focus = document.activeElement instanceof HTMLElement ? document.activeElement.dataset.focus : undefined;
    fill(list, ...problems(told), told.jobs.length ? jobs(told) : nothing());
    fill(rest, section("Nodes", nodes(told.nodes)), section("People and shares", people(told)));
    if (focus) root.querySelector<HTMLElement>(`[data-focus="${CSS.escape(focus)}"]`)?.focus();
    root.dataset.drawn = String(told.jobs.length);
  }

  function nothing(): HTMLElement {
    if (state.search || state.state) return empty("No job fits.", "Search for less, or choose another state.");
    return empty("The queue is empty.", h("span", null, "Put a job into it with ", h("code", null, "shoal submit SCRIPT"), "."));
  }

  refresh();
  const live = new Live([], "jobs", { onAlso: refresh, onState });
  const timer = window.setInterval(() => (document.hidden ? undefined : refresh()), 5000);
  const onKey = (event: KeyboardEvent): void => {
    if (event.key === "/" && !(event.target instanceof HTMLInputElement)) {
      event.preventDefault();
      search.focus();
    }
  };
  document.addEventListener("keydown", onKey);
  return {
    close: () => {
      live.close();
      window.clearInterval(timer);
      document.removeEventListener("keydown", onKey);
    },
  };
}

function problems(told: Told): HTMLElement[] {
  return Object.entries(told.problems).filter(([, text]) => text).map(([name, text]) => failure({ message: `The service has a problem: ${name}`, why: text }));
}

function section(title: string, inner: HTMLElement): HTMLElement {
  return h("section", { class: "stack" }, h("h2", null, title), inner);
}

function table(label: string, titles: [string, string][], rows: HTMLElement[]): HTMLElement {
  const heads = titles.map(([title, kind]) => h("th", { scope: "col", class: kind }, title));
  return h("div", { class: "card table-card" }, h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, h("table", { class: "queue" }, h("thead", null, h("tr", null, ...heads)), h("tbody", null, ...rows))));
}

function jobs(told: Told): HTMLElement {
  const titles: [string, string][] = [["Job", "number"], ["Name", ""], ["Owner", "hide-narrow"], ["State", ""], ["Workers", "number hide-narrow"], ["Class", "hide-narrow"], ["Priority", "number hide-narrow"], ["Time", "number"], ["Starts", "hide-narrow"]];
  const shown = table("Jobs", titles, told.jobs.flatMap(lines));
  const left = told.total - told.jobs.length;
  return left > 0 ? h("div", null, shown, h("p", { class: "quiet small" }, `${count(left)} more; search for less to see them`)) : shown;
}

function lines(job: Job): HTMLElement[] {
  const bounds = job.is_elastic ? `${job.min_workers}:${job.max_workers}` : String(job.max_workers);
  const hasNodes = Object.keys(job.nodes).length > 0;
  const isWaiting = job.state === "waiting" || job.state === "held";
  const reason = job.why || (job.state === "failed" ? job.message : "");
  const cell = (kind: string, ...inner: Child[]): HTMLElement => h("td", { class: kind }, ...inner);
  const row = h(
    "tr",
    { "data-job": job.job, class: reason ? "has-reason" : null },
    cell("number", h("a", { href: `/?search=${encodeURIComponent(job.run)}`, "data-focus": `job-${job.job}`, title: "Its run" }, job.job)),
    cell("name", bdi(job.index === null ? job.name : `${job.name}[${job.index}]`)),
    cell("hide-narrow", bdi(job.owner)),
    cell("", h("span", { class: `status ${TONES[job.state] ?? ""}` }, job.state === "waiting" && job.position ? `waiting, number ${job.position}` : job.state)),
    cell("number hide-narrow", hasNodes ? `${job.workers} of ${bounds}` : bounds),
    cell("hide-narrow", job.class),
    cell("number hide-narrow", number(job.priority)),
    h("td", { class: "number fixed", title: `submitted ${clock(job.submitted)}` }, duration(isWaiting ? job.waited_seconds : job.run_seconds)),
    cell("fixed hide-narrow", job.eta_seconds === null ? "" : `in ${duration(job.eta_seconds)}`),
  );
  return reason ? [row, h("tr", { class: "reason" }, h("td", null), h("td", { colspan: 8, class: "quiet small" }, prose(reason)))] : [row];
}

function nodes(rows: Node[]): HTMLElement {
  if (!rows.length) return empty("No nodes yet.", "The service looks for them when it starts.");
  const titles: [string, string][] = [["Node", ""], ["State", ""], ["Partition", "hide-narrow"], ["Free cores", "number"], ["Free memory", "number"], ["Free GPUs", "number hide-narrow"], ["Jobs", "hide-narrow"]];
  return table("Nodes", titles, rows.map((node) =>
    h(
      "tr",
      null,
      h("td", { class: "name" }, bdi(node.node), node.why_draining ? h("span", { class: "quiet small" }, " ", bdi(node.why_draining)) : null),
      h("td", null, node.is_alive ? (node.is_draining ? "draining" : node.jobs.length ? "busy" : "free") : "gone"),
      h("td", { class: "hide-narrow" }, bdi(node.partition)),
      h("td", { class: "number" }, `${number(node.free_cores)} of ${number(node.cores)}`),
      h("td", { class: "number" }, `${gib(Math.max(0, node.free_memory_bytes))} of ${gib(node.memory_bytes)}`),
      h("td", { class: "number hide-narrow" }, node.gpus ? `${number(node.free_gpus)} of ${number(node.gpus)}` : "–"),
      h("td", { class: "hide-narrow" }, node.jobs.map((held) => held.job).join(", ")),
    )));
}

function people(told: Told): HTMLElement {
  const titles: [string, string][] = [["Person", ""], ["Role", "hide-narrow"], ["Account", "hide-narrow"], ["Jobs", "number"], ["Workers", "number"], ["Lately", "number"], ["In all", "number hide-narrow"]];
  const of = (has: number, most: number | null): string => (most === null ? count(has) : `${count(has)} of ${count(most)}`);
  const names = [...new Set([...told.people.map((each) => each.person), ...told.shares.map((each) => each.person)])];
  const rows = names.map((name) => {
    const person = told.people.find((each) => each.person === name);
    const used = told.shares.filter((each) => each.person === name);
    const sum = (value: (share: Share) => number): number => used.reduce((all, each) => all + value(each), 0);
    const part = sum((each) => each.part);
    return h(
      "tr",
      null,
      h("td", { class: "name" }, bdi(name)),
      h("td", { class: "hide-narrow" }, person?.role ?? "not let in any more"),
      h("td", { class: "hide-narrow" }, bdi(used.map((each) => each.account).filter((account) => account !== name).join(", ") || person?.account || "–")),
      h("td", { class: "number" }, person ? of(person.num_jobs, person.max_jobs) : "–"),
      h("td", { class: "number" }, person ? of(person.num_workers, person.max_workers) : "–"),
      h("td", { class: "number" }, h("progress", { max: 1, value: part, "aria-label": `Share of ${name}: ${percent(part)}` }), ` ${percent(part)}`),
      h("td", { class: "number hide-narrow" }, duration(sum((each) => each.worker_seconds))),
    );
  });
  return table("People and shares", titles, rows);
}
