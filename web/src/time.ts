// Where the time went: what `shoal explain` says, drawn.

import { ask } from "./api";
import { bdi, empty, failure, fill, gentle, h, loading, prose, s } from "./dom";
import { brief, count, duration, number, percent } from "./format";
import type { Run, View } from "./types";

const PARTS: [string, string][] = [
  ["compute", "Compute"],
  ["communicate", "Communication"],
  ["wait", "Waiting for others"],
  ["load", "Loading data"],
  ["other", "Other"],
];
const ALL_PARTS: [string, string][] = [
  ...PARTS.slice(0, 4),
  ["other", "Rest of a step"],
  ["checkpoint", "Saving checkpoints"],
  ["recover", "Recovering from losses and joins"],
  ["between", "Between steps"],
];

const MAX_DIAGNOSES = 12;

type Shares = Record<string, number>;
interface Rank { rank: number; shares: Shares; own_seconds: number; step_seconds: number; num_steps: number; num_waited_for: number }
interface Breakdown { num_steps: number; step_median_seconds: number; step_p99_seconds: number; samples_per_second: number; warmup_steps: number; warmup_seconds: number; shares: Shares; ranks: Rank[]; slowest: number | null }
interface Finding { what: string; why: string; change: string; gain: number | null }
interface Period { start: number; end: number; parts: Shares; num_steps: number; waited_for: number | null; waited_seconds: number }
interface Spending { wall_seconds: number; parts: Shares; num_checkpoints: number; waited_for: Record<string, number>; periods: Period[] }
interface Told { cause: string; time: number; message: string; why: string; hint: string; cost: number | null; rank: number | null; step: number | null }
interface Explanation {
  spending: Spending | null;
  diagnoses: Told[];
  breakdown: Breakdown | null;
  findings: Finding[];
  history: { effective_ratio: number | null; spent: Record<string, number> | null } | null;
  notes: { kind: string; count: number; text: string }[];
  items: Record<string, number> | null;
}

export function showTime(root: HTMLElement, run: Run): View {
  fill(root, loading("what became of the time"));
  const refresh = gentle(async () => {
    try {
      draw(await ask<Explanation>(`runs/${encodeURIComponent(run.id)}/explain`));
    } catch (error) {
      fill(root, failure(error));
    }
  }, 5000);

  function draw(told: Explanation): void {
    const { breakdown } = told;
    if (!breakdown) {
      fill(root, diagnoses(told, run), findings(told), empty("No steps were recorded.", "Times appear with the first steps that a shoal.Trainer takes."));
      return;
    }
    fill(root, h("div", { class: "stack" }, summary(breakdown), diagnoses(told, run), spending(told.spending), findings(told), bars(breakdown), elastic(told), notes(told)));
    root.dataset.drawn = "1";
  }

  refresh();
  return { news: (changed) => (changed.includes("series") || changed.includes("status") ? refresh() : undefined) };
}

function summary(told: Breakdown): HTMLElement {
  const fact = (name: string, value: string): HTMLElement => h("div", { class: "fact" }, h("dt", null, name), h("dd", null, value));
  return h(
    "dl",
    { class: "card facts" },
    fact("Steps", count(told.num_steps)),
    fact("A step takes", brief(told.step_median_seconds)),
    fact("99 % take less than", brief(told.step_p99_seconds)),
    fact("Samples per second", number(told.samples_per_second)),
    fact("Warm-up, not counted", `${told.warmup_steps} in ${brief(told.warmup_seconds)}`),
    told.slowest === null ? null : fact("Slowest", `rank ${told.slowest}`),
  );
}

/** What was said to be wrong while the run ran, the newest first. */
function diagnoses(told: Explanation, run: Run): HTMLElement | null {
  if (!told.diagnoses.length) return null;
  const shown = [...told.diagnoses].reverse().slice(0, MAX_DIAGNOSES);
  const rest = told.diagnoses.length - shown.length;
  return h(
    "section",
    { class: "card stack" },
    h("h2", null, "What was wrong while it ran"),
    ...shown.map((one) =>
      h(
        "div",
        { class: "finding" },
        h("strong", null, bdi(one.message)),
        h("span", { class: "quiet small" }, [`after ${duration(one.time - run.created)}`, one.step === null ? "" : `step ${count(one.step)}`, one.cost ? `costs ${one.cost.toFixed(0)} % of the time` : ""].filter(Boolean).join(", ")),
        one.why ? h("span", null, h("span", { class: "quiet" }, "Why: "), bdi(one.why)) : null,
        one.hint ? h("span", null, h("span", { class: "quiet" }, "What to do: "), prose(one.hint)) : null,
      ),
    ),
    rest > 0 ? h("p", { class: "quiet small" }, `${count(rest)} more, of before, are on the Events tab.`) : null,
  );
}

/** All of the time from the first step to the last, as a whole and period by period. */
function spending(told: Spending | null): HTMLElement | null {
  if (!told) return null;
  const rows = ALL_PARTS.filter(([part]) => told.parts[part] > 0).map(([part, title]) =>
    h("tr", null, h("td", null, h("span", { class: `key k-${part}` }, title)), h("td", { class: "number" }, percent(told.parts[part])), h("td", { class: "number" }, brief(told.parts[part] * told.wall_seconds))),
  );
  const head = ["Part", "Share", "Time"].map((name, i) => h("th", { scope: "col", class: i ? "number" : "" }, name));
  const waited = Object.entries(told.waited_for).sort((a, b) => b[1] - a[1]).slice(0, 4).filter(([, seconds]) => seconds > 0.005 * told.wall_seconds);
  return h(
    "section",
    { class: "card stack" },
    h("h2", null, `Where ${brief(told.wall_seconds)} went, from the first step to the last`),
    h("div", { class: "bars whole" }, bar("All of it", told.parts, ALL_PARTS)),
    h("div", { class: "spent" }, h("table", { class: "tight" }, h("thead", null, h("tr", null, ...head)), h("tbody", null, ...rows)), periods(told)),
    waited.length ? h("p", { class: "quiet small" }, `Waited for, by all others together: ${waited.map(([rank, seconds]) => `rank ${rank} for ${brief(seconds)}`).join(", ")}.`) : null,
  );
}

function periods(told: Spending): HTMLElement {
  const [width, height] = [480, 150];
  const step = width / Math.max(1, told.periods.length);
  const drawn = told.periods.flatMap((period, index) => {
    let y = height;
    return ALL_PARTS.flatMap(([part, title]) => {
      const tall = height * (period.parts[part] ?? 0);
      y -= tall;
      const words = `${brief(period.start)} to ${brief(period.end)}: ${title} ${percent(period.parts[part] ?? 0)}`;
      return tall > 0 ? [s("rect", { x: index * step + 0.75, y, width: Math.max(0.5, step - 1.5), height: tall, class: `f-${part}` }, s("title", null, words))] : [];
    });
  });
  const late = told.periods.map((period, index) => {
    const isWorth = period.waited_for !== null && period.waited_seconds > 0.02 * (period.end - period.start);
    return isWorth ? s("text", { x: (index + 0.5) * step, y: height + 13, "text-anchor": "middle" }, period.waited_for ?? "") : null;
  });
  const isLate = late.some((one) => one !== null);
  const label = `The same over time, in ${told.periods.length} periods; the table beside it has the sums.`;
  return h(
    "div",
    { class: "stack" },
    s("svg", { class: "periods", viewBox: `0 0 ${width} ${height + (isLate ? 18 : 2)}`, role: "img", "aria-label": label }, ...drawn, ...late),
    h("div", { class: "heat-axis" }, h("span", null, "first step"), isLate ? h("span", null, "below: the rank that was waited for most") : null, h("span", null, brief(told.wall_seconds))),
  );
}

function bars(told: Breakdown): HTMLElement {
  const rows = [{ name: "All", shares: told.shares, note: "" }, ...told.ranks.map((rank) => ({ name: `Rank ${rank.rank}`, shares: rank.shares, note: `${brief(rank.own_seconds)} of its own` }))];
  return h(
    "section",
    { class: "card stack" },
    h("h2", null, "Where the time of a step went"),
    h("ul", { class: "keys" }, ...PARTS.map(([part, title]) => h("li", { class: `key k-${part}` }, title))),
    h("div", { class: "bars" }, ...rows.flatMap((row) => [h("span", { class: "small" }, row.name), bar(row.name, row.shares), h("span", { class: "small quiet" }, row.note)])),
    h(
      "div",
      { class: "scroll", tabindex: 0, role: "group", "aria-label": "The same as numbers" },
      h(
        "table",
        null,
        h("thead", null, h("tr", null, h("th", { scope: "col" }, ""), ...PARTS.map(([, title]) => h("th", { scope: "col", class: "number" }, title)))),
        h("tbody", null, ...rows.map((row) => h("tr", null, h("th", { scope: "row" }, row.name), ...PARTS.map(([part]) => h("td", { class: "number" }, percent(row.shares[part] ?? 0)))))),
      ),
    ),
  );
}

function bar(name: string, shares: Shares, named = PARTS): SVGElement {
  let x = 0;
  const words = named.filter(([part]) => shares[part] > 0).map(([part, title]) => `${title} ${percent(shares[part] ?? 0)}`).join(", ");
  const parts = named.map(([part, title]) => {
    const width = 1000 * (shares[part] ?? 0);
    const rect = s("rect", { x, width, height: 20, class: `f-${part}` }, s("title", null, `${title} ${percent(shares[part] ?? 0)}`));
    x += width;
    return rect;
  });
  return s("svg", { viewBox: "0 0 1000 20", preserveAspectRatio: "none", role: "img", "aria-label": `${name}: ${words}` }, ...parts);
}

function findings(told: Explanation): HTMLElement {
  const title = h("h2", null, "What to change");
  if (!told.findings.length) return h("section", { class: "card stack" }, title, h("p", { class: "quiet" }, "Nothing stands out."));
  return h(
    "section",
    { class: "card stack" },
    title,
    ...told.findings.map((found) =>
      h(
        "div",
        { class: "finding" },
        h("strong", null, bdi(found.what)),
        found.gain ? h("span", { class: "gain" }, `Up to ${percent(found.gain)} less time`) : null,
        found.why ? h("span", null, h("span", { class: "quiet" }, "Why: "), bdi(found.why)) : null,
        found.change ? h("span", null, h("span", { class: "quiet" }, "What to do: "), prose(found.change)) : null,
      ),
    ),
  );
}

function elastic(told: Explanation): HTMLElement | null {
  const ratio = told.history?.effective_ratio;
  if (ratio === null || ratio === undefined || !told.history?.spent) return null;
  const { wall, ...parts } = told.history.spent;
  const names: Record<string, string> = { productive: "steps that count", losses: "losses of workers", joins: "joins", redone: "steps redone", between: "between steps" };
  return h(
    "section",
    { class: "card stack" },
    h("h2", null, `Effective training time: ${percent(ratio)} of ${brief(wall)}`),
    h("dl", { class: "facts" }, ...Object.entries(parts).map(([name, seconds]) => h("div", { class: "fact" }, h("dt", null, names[name] ?? name), h("dd", null, brief(seconds))))),
  );
}

function notes(told: Explanation): HTMLElement | null {
  if (!told.notes.length) return null;
  const rows = told.notes.map((note) => h("tr", null, h("td", { class: "fixed" }, note.kind.replaceAll("_", " ")), h("td", { class: "number" }, `${note.count}×`), h("td", null, bdi(note.text))));
  return h("section", { class: "card stack" }, h("h2", null, "Worth knowing"), h("div", { class: "scroll", tabindex: 0 }, h("table", { class: "told" }, h("tbody", null, ...rows))));
}
