// The page of a run: what it is in a few words, and tabs for the rest.

import { Failure, Live, ask } from "./api";
import { showCheckpoints } from "./checkpoints";
import { showCurves } from "./curves";
import { bdi, copyButton, empty, failure, fill, gentle, h, loading, prose } from "./dom";
import { showEvents } from "./events";
import { ago, clock, duration, number } from "./format";
import { showRanks } from "./heat";
import { showLogs } from "./logs";
import { showSettings } from "./settings";
import { showStacks } from "./stacks";
import { status, steps, workers } from "./status";
import { showSystem } from "./system";
import { showTime } from "./time";
import type { Run, View } from "./types";
import { showWorld } from "./world";

type Tab = (root: HTMLElement, run: Run) => View;

const TABS: Record<string, [string, Tab]> = {
  curves: ["Curves", (root, run) => showCurves(root, [run])],
  time: ["Time", showTime],
  ranks: ["Ranks", showRanks],
  world: ["World", showWorld],
  checkpoints: ["Checkpoints", showCheckpoints],
  logs: ["Logs", showLogs],
  events: ["Events", showEvents],
  system: ["System", showSystem],
  stacks: ["Stacks", showStacks],
  settings: ["Settings", showSettings],
};

export function showRun(root: HTMLElement, id: string, tab: string, onState: (isLive: boolean) => void): View {
  const path = `runs/${encodeURIComponent(id)}`;
  const head = h("div", { class: "head" });
  const tabs = h(
    "nav",
    { class: "tabs", "aria-label": "Parts of the run" },
    ...Object.entries(TABS).map(([name, [title]]) => h("a", { href: `/run/${encodeURIComponent(id)}${name === "curves" ? "" : `/${name}`}`, "aria-current": name === tab ? "page" : null }, title)),
  );
  const body = h("div", null);
  let run: Run | null = null;
  let live: Live | null = null;
  let isClosed = false;
  const gone = h("div", { class: "cause", role: "alert", hidden: true }, h("strong", null, "The folder of this run was removed."), h("span", null, "What you see was read before."));
  fill(root, gone, head, tabs, body);
  fill(head, loading("the run"));
  // Curves need nothing of what the head shows, so they are asked for at once.
  const isEager = tab === "curves";
  const curves = isEager ? showCurves(body, [{ id, name: id, created: 0 }]) : null;
  let view: View = curves ?? {};
  tabs.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });

  const refresh = gentle(async () => {
    try {
      const found = await ask<Run>(path);
      if (isClosed) return;
      gone.hidden = true;
      drawHead(head, found);
      if (run === null) {
        document.title = `${found.name} · shoal`;
        run = found;
        if (curves) curves.start(found.created);
        else if (tab in TABS) view = TABS[tab][1](body, found);
        else fill(body, empty("There is no such part of a run."));
      } else {
        Object.assign(run, found);
      }
    } catch (error) {
      if (isClosed) return;
      const isGone = error instanceof Failure && error.status === 404;
      if (run !== null) {
        gone.hidden = !isGone;
        return;
      }
      tabs.hidden = true;
      fill(body);
      fill(head, isGone ? empty("There is no such run.", "Its folder may have been removed.", h("a", { href: "/" }, "All runs")) : failure(error));
    }
  }, 500);

  refresh();
  live = new Live([id], null, {
    onRun: (_, changed) => {
      refresh();
      view.news?.(changed);
    },
    onState,
  });
  return {
    close: () => {
      isClosed = true;
      view.close?.();
      live?.close();
    },
  };
}

function drawHead(head: HTMLElement, run: Run): void {
  const fact = (name: string, value: string, title = ""): HTMLElement => h("div", { class: "fact" }, h("dt", null, name), h("dd", { title }, value));
  const again = h("span", { class: "quiet small" }, "Do it again: ");
  const command = h("div", { class: "command-line" }, h("div", null, again, h("code", null, bdi(run.reproduce))), run.reproduce ? copyButton(run.reproduce) : null);
  const place = run.cause && [run.cause.rank !== null ? `rank ${run.cause.rank}` : "", run.cause.step !== null ? `step ${run.cause.step}` : "", run.cause.where].filter(Boolean).join(", ");
  const cause = run.cause
    ? h(
        "div",
        { class: "cause" },
        h("strong", null, bdi(run.cause.message)),
        place ? h("span", { class: "quiet" }, "At ", bdi(place)) : null,
        run.cause.why ? h("span", null, "Why: ", bdi(run.cause.why)) : null,
        run.cause.hint ? h("span", null, "What to do: ", prose(run.cause.hint)) : null,
      )
    : null;
  const focus = document.activeElement;
  if (focus instanceof HTMLElement && head.contains(focus)) return;
  fill(
    head,
    h("div", { class: "head-row" }, h("h1", null, bdi(run.name)), status(run)),
    h(
      "dl",
      { class: "facts" },
      fact(run.items ? "Items" : "Steps", run.items ? steps(run).replace(" items", "") : steps(run)),
      fact("Loss", number(run.loss)),
      fact("Workers", workers(run)),
      fact("Time", duration(run.seconds)),
      fact("Started", ago(run.created), clock(run.created)),
      fact("On", run.host || "–"),
    ),
    cause,
    command,
  );
}
