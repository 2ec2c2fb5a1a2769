// Who took part and when: a lane for each worker, with what happened to it.

import { ask } from "./api";
import { bdi, empty, failure, fill, gentle, h, loading, prose, s } from "./dom";
import { clock, count, duration } from "./format";
import type { Era, Happening, Run, View, World } from "./types";

const MAX_LANES = 64;
const LEFT = 64;

export function showWorld(root: HTMLElement, run: Run): View {
  let world: World | null = null;
  fill(root, loading("who took part"));
  const refresh = gentle(async () => {
    try {
      world = await ask<World>(`runs/${encodeURIComponent(run.id)}/world`);
      draw();
    } catch (error) {
      fill(root, failure(error));
    }
  }, 500);

  function draw(): void {
    if (!world) return;
    if (!world.eras.length) return fill(root, empty("No worker has started yet."), marks(world));
    fill(root, h("div", { class: "stack" }, picture(world, Math.max(280, root.clientWidth - 34)), marks(world), worlds(world)));
    root.dataset.drawn = String(world.eras.length);
  }

  const watcher = new ResizeObserver(() => draw());
  watcher.observe(root);
  refresh();
  return {
    news: (changed) => (changed.includes("events") || changed.includes("status") || run.status === "running" ? refresh() : undefined),
    close: () => watcher.disconnect(),
  };
}

function picture(world: World, width: number): HTMLElement {
  const numbers = [...new Set(world.eras.flatMap((era) => era.members.map(workerOf)))].sort((a, b) => a - b);
  const lanes = numbers.slice(0, MAX_LANES);
  const most = Math.max(1, world.most ?? 0, ...world.eras.map((era) => era.workers));
  const span = Math.max(1e-3, world.end - world.start);
  const x = (time: number): number => LEFT + ((Math.min(Math.max(time, world.start), world.end) - world.start) / span) * (width - LEFT - 10);
  const laneHeight = lanes.length > 16 ? 10 : 20;
  const top = 84;
  const height = top + lanes.length * laneHeight + 30;
  const y = (workers: number): number => 64 - (workers / most) * 52;

  let line = "";
  for (const era of world.eras) line += `${line ? "L" : "M"}${x(era.time)},${y(era.workers)}L${x(era.until)},${y(era.workers)}`;
  const first = world.eras[0];
  const last = world.eras[world.eras.length - 1];
  const area = `${line}L${x(last.until)},${y(0)}L${x(first.time)},${y(0)}Z`;
  const ticks = [0, 0.25, 0.5, 0.75, 1].filter((_, i) => width > 500 || i % 2 === 0);
  const bars = lanes.flatMap((number, row) =>
    spans(world.eras, number).map(([from, to, member]) =>
      s("rect", { x: x(from), y: top + row * laneHeight + 2, width: Math.max(1.5, x(to) - x(from) - 1), height: laneHeight - 4, rx: 3, class: "lane" }, s("title", null, `worker ${member}: ${duration(to - from)}`)),
    ),
  );
  const dots = world.marks.map((mark) => {
    const row = mark.rank === null ? -1 : lanes.indexOf(mark.rank);
    const cy = row < 0 ? y(0) + 9 : top + (row + 0.5) * laneHeight;
    return s("circle", { cx: x(mark.time), cy, r: Math.min(5, laneHeight / 2), class: `m-${mark.severity}` }, s("title", null, `${words(mark)}, after ${duration(mark.time - world.start)}`));
  });
  const every = laneHeight < 14 ? 2 : 1;
  const label = `${most} workers at most; ${world.eras.length} Worlds; ${world.num_marks} marks. The table below has the same.`;
  const svg = s(
    "svg",
    { class: "world", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label },
    ...[0, most].map((value) => s("line", { x1: LEFT, x2: width - 10, y1: y(value), y2: y(value), class: "grid" })),
    s("text", { x: LEFT - 8, y: y(most) + 4, "text-anchor": "end" }, most),
    s("text", { x: LEFT - 8, y: y(0) + 4, "text-anchor": "end" }, 0),
    s("path", { d: area, class: "area" }),
    ...lanes.map((number, row) => (row % every ? null : s("text", { x: LEFT - 8, y: top + (row + 0.5) * laneHeight + 4, "text-anchor": "end" }, `rank ${number}`))),
    ...bars,
    ...dots,
    ...ticks.map((part) => s("text", { x: LEFT + part * (width - LEFT - 10), y: height - 8, "text-anchor": part === 0 ? "start" : part === 1 ? "end" : "middle" }, duration(part * span))),
  );
  return h(
    "section",
    { class: "card stack" },
    h("div", { class: "head-row" }, h("h2", null, "Workers over time"), h("ul", { class: "keys" }, h("li", { class: "key k-bad" }, "lost, failed or late"), h("li", { class: "key k-good" }, "joined or came back"), h("li", { class: "key k-note" }, "done on purpose"))),
    svg as unknown as HTMLElement,
    numbers.length > lanes.length ? h("p", { class: "quiet small" }, `Lanes of the first ${MAX_LANES} of ${count(numbers.length)} workers.`) : null,
  );
}

function workerOf(member: string): number {
  return Number.parseInt(member, 10) || 0;
}

/** When a worker was there: [from, to, member], neighbouring Worlds with the same process joined. */
function spans(eras: Era[], number: number): [number, number, string][] {
  const found: [number, number, string][] = [];
  for (const era of eras) {
    const member = era.members.find((each) => workerOf(each) === number);
    if (member === undefined) continue;
    const before = found[found.length - 1];
    if (before && before[2] === member && before[1] >= era.time - 1e-6) before[1] = era.until;
    else found.push([era.time, era.until, member]);
  }
  return found;
}

function words(mark: Happening): string {
  return `${mark.kind.replaceAll("_", " ")}${mark.rank === null ? "" : `, rank ${mark.rank}`}`;
}

function marks(world: World): HTMLElement {
  if (!world.marks.length) return h("section", { class: "card stack" }, h("h2", null, "What happened to workers"), h("p", { class: "quiet" }, "Nothing went wrong, and nobody came or went."));
  const rows = [...world.marks].reverse().map((mark) =>
    h(
      "tr",
      null,
      h("td", { class: "fixed", title: clock(mark.time, true) }, duration(mark.time - world.start)),
      h("td", { class: `fixed t-${mark.severity}` }, mark.kind.replaceAll("_", " ")),
      h("td", { class: "number", "data-name": "rank" }, mark.rank ?? "–"),
      h("td", { class: "number", "data-name": "step" }, mark.step ?? "–"),
      h("td", null, bdi(mark.text), mark.why ? h("div", { class: "quiet small" }, "Why: ", bdi(mark.why)) : null, mark.hint ? h("div", { class: "quiet small" }, "What to do: ", prose(mark.hint)) : null),
    ),
  );
  const heads = ["After", "What", "Rank", "Step", ""].map((title, i) => h("th", { scope: "col", class: i === 2 || i === 3 ? "number" : "" }, title));
  return h("section", { class: "stack" }, h("h2", null, "What happened to workers"), h("div", { class: "card table-card scroll", tabindex: 0 }, h("table", { class: "tight told" }, h("thead", null, h("tr", null, ...heads)), h("tbody", null, ...rows))));
}

function worlds(world: World): HTMLElement | null {
  if (world.eras.length < 2) return null;
  const rows = [...world.eras].reverse().map((era) =>
    h(
      "tr",
      null,
      h("td", { class: "number", "data-name": "World" }, era.generation),
      h("td", { class: "fixed", "data-name": "after" }, duration(era.time - world.start)),
      h("td", { class: "number", "data-name": "lasted" }, duration(era.until - era.time)),
      h("td", { class: "number", "data-name": "workers" }, era.workers),
      h("td", null, bdi(era.reason)),
    ),
  );
  const heads = ["World", "After", "Lasted", "Workers", "Why it began"].map((title, i) => h("th", { scope: "col", class: i === 0 || i === 2 || i === 3 ? "number" : "" }, title));
  return h("section", { class: "stack" }, h("h2", null, "Worlds"), h("div", { class: "card table-card scroll", tabindex: 0 }, h("table", { class: "tight told" }, h("thead", null, h("tr", null, ...heads)), h("tbody", null, ...rows))));
}
