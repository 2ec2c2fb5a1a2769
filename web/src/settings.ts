// Every value in effect and where it came from; the job; versions; and how to do it again.

import { bdi, copyButton, empty, fill, h } from "./dom";
import type { Run, View } from "./types";

export function showSettings(root: HTMLElement, run: Run): View {
  const table = (label: string, heads: string[], rows: string[][]): HTMLElement =>
    h(
      "div",
      { class: "card table-card scroll", tabindex: 0, role: "group", "aria-label": label },
      h("table", null, h("thead", null, h("tr", null, ...heads.map((title) => h("th", { scope: "col" }, title)))), h("tbody", null, ...rows.map((row) => h("tr", { class: row[2] === "default" ? "quiet" : "" }, ...row.map((text, i) => h("td", { class: i === 1 ? "mono" : "" }, bdi(text))))))),
    );
  const draw = (): void => {
    const search = h("input", { type: "search", placeholder: "Search settings", "aria-label": "Search settings" });
    const place = h("div", null);
    const show = (): void => {
      const wanted = search.value.toLowerCase();
      const rows = run.settings.filter((each) => `${each.name} ${each.value} ${each.source}`.toLowerCase().includes(wanted)).sort((a, b) => Number(a.source === "default") - Number(b.source === "default"))
        .map((each) => [each.name, each.value, each.source || "–"]);
      fill(place, rows.length ? table("Settings", ["Setting", "Value", "Came from"], rows) : empty("No setting fits."));
    };
    search.addEventListener("input", show);
    show();
    const line = (title: string, text: string): HTMLElement => h("div", { class: "stack" }, h("h2", null, title), h("div", { class: "command-line" }, h("code", null, bdi(text || "not known")), text ? copyButton(text) : null));
    const versions = Object.entries(run.versions).map(([name, version]) => [name, version]);
    fill(
      root,
      h(
        "div",
        { class: "stack" },
        run.reproduce.includes("=***") ? h("p", { class: "quiet small" }, "*** stands for values of --env, which are not kept.") : null,
        run.status === "running" ? null : line("Go on from its last checkpoint", run.resume),
        h("div", { class: "head-row" }, h("h2", null, "Settings"), h("span", { class: "quiet small" }, "those that somebody chose come first")),
        run.settings.length ? h("div", null, h("div", { class: "tools" }, search), place) : empty("No settings were recorded.", "A shoal.Trainer records them when it starts."),
        h("h2", null, "Job"),
        run.job.length ? table("Job", ["Name", "Value"], run.job.map((each) => [each.name, each.value])) : empty("The job was not recorded."),
        versions.length ? h("h2", null, "Versions") : null,
        versions.length ? table("Versions", ["Package", "Version"], versions) : null,
        h("p", { class: "quiet small" }, "Run folder: ", h("code", null, bdi(run.path))),
      ),
    );
    root.dataset.drawn = String(run.settings.length);
  };
  draw();
  const numSettings = run.settings.length;
  return { news: () => (run.settings.length !== numSettings ? draw() : undefined) };
}
