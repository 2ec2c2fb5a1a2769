// One chart: curves with the range that each point stands for, a readout, and zooming by mouse and by keys.

import uPlot from "uplot";
import { h } from "./dom";
import { clock, duration, hour, number } from "./format";
import { color, faint, onTheme } from "./theme";

export type Axis = "step" | "relative" | "clock";
export type Values = (number | null | undefined)[];

export interface Line { label: string; color: string; key?: string; short?: string; x: number[]; mean: Values; low?: Values; high?: Values }

export interface Look { axis: Axis; isLog: boolean; smoothing: number; min?: number; max?: number; format?: (value: number) => string; floor?: number }

/** The range that is shown; null shows all. */
export type Range = [number, number] | null;

const HEIGHT = 190;

export class Chart {
  readonly element: HTMLElement;
  private readonly host: HTMLElement;
  private readonly value: HTMLElement;
  private plot: uPlot | null = null;
  private lines: Line[] = [];
  private look: Look = { axis: "step", isLog: false, smoothing: 0 };
  private shape = "";
  private readonly stopTheme: () => void;
  private readonly watcher: ResizeObserver;

  constructor(private readonly title: string, private readonly onRange: (range: Range) => void) {
    this.value = h("span", { class: "chart-value" });
    this.host = h("div", { class: "plot", tabindex: 0, role: "group" });
    const name = h("h3", null, h("bdi", null, title));
    this.element = h("section", { class: "card chart" }, h("div", { class: "chart-head" }, name, this.value), this.host);
    this.host.addEventListener("keydown", this.onKey);
    this.host.addEventListener("dblclick", () => this.onRange(null));
    this.stopTheme = onTheme(() => this.make());
    this.watcher = new ResizeObserver(() => {
      if (this.plot) this.plot.setSize({ width: this.width(), height: HEIGHT });
      else if (this.lines.length) this.make();
    });
    this.watcher.observe(this.host);
  }

  show(lines: Line[], look: Look): void {
    this.lines = lines;
    const shape = JSON.stringify([look, lines.map((line) => [line.label, line.color, !line.low])]);
    this.look = look;
    if (this.plot && shape === this.shape) {
      this.plot.setData(this.data());
      this.tell();
    } else {
      this.shape = shape;
      this.make();
    }
  }

  close(): void {
    this.stopTheme();
    this.watcher.disconnect();
    this.plot?.destroy();
    this.plot = null;
  }

  private width(): number {
    return Math.max(200, this.host.clientWidth);
  }

  /** Columns side by side on one axis; each line has four: smoothed, as it was, low, high. */
  private data(): uPlot.AlignedData {
    const tables = this.lines.map((line) => {
      const clean = (values: Values): Values => (this.look.isLog ? values.map((v) => (v !== null && v !== undefined && v > 0 ? v : null)) : values);
      const mean = clean(line.mean);
      return [line.x, smooth(mean, this.look.smoothing), mean, clean(line.low ?? line.mean), clean(line.high ?? line.mean)];
    });
    return (tables.length === 1 ? tables[0] : uPlot.join(tables as uPlot.AlignedData[])) as uPlot.AlignedData;
  }

  private make(): void {
    this.plot?.destroy();
    this.plot = null;
    if (!this.lines.length || !this.host.clientWidth) return;
    const { axis, isLog, smoothing } = this.look;
    const format = this.look.format ?? number;
    const series: uPlot.Series[] = [{}];
    const bands: uPlot.Band[] = [];
    this.lines.forEach((line, index) => {
      const first = 1 + 4 * index;
      const stroke = color(line.color);
      const hidden = { stroke: "transparent", width: 0, points: { show: false } };
      series.push(
        { stroke, width: 1.75, spanGaps: false, points: { size: 4, fill: stroke } },
        smoothing > 0 ? { stroke: faint(line.color, 0.3), width: 1, points: { show: false } } : { ...hidden },
        { ...hidden },
        { ...hidden },
      );
      if (line.low) bands.push({ series: [first + 3, first + 2], fill: faint(line.color, 0.18) });
    });
    const axes = { stroke: color("quiet"), grid: { stroke: color("line"), width: 1 }, ticks: { stroke: color("line"), width: 1, size: 4 }, font: "12px system-ui, sans-serif" };
    const xValues = (_: uPlot, splits: number[]): string[] => splits.map((v) => (axis === "step" ? number(v) : axis === "clock" ? hour(v, splits[1] - splits[0]) : duration(v)));
    const room = (_: uPlot, values: string[] | null): number => Math.max(40, 16 + 6.6 * Math.max(0, ...(values ?? []).map((text) => text.length)));
    const floor = this.look.floor;
    this.plot = new uPlot(
      {
        width: this.width(),
        height: HEIGHT,
        legend: { show: false },
        // The last label may stand at the very end.
        padding: [8, 20, 0, 0],
        cursor: { drag: { x: true, y: false, setScale: false }, points: { size: 6 }, y: false },
        scales: {
          x: { time: axis === "clock", range: (_, min, max) => (min === max ? [min - 1, max + 1] : [min, max]) },
          y: isLog ? { distr: 3 } : floor === undefined ? {} : { range: (_, min, max) => [Math.min(floor, min ?? floor), Math.max(max ?? 1, floor + 1e-9) * 1.05] },
        },
        axes: [
          { ...axes, values: xValues, size: 30, space: axis === "step" ? 50 : 70 },
          { ...axes, size: room, values: (_, splits) => splits.map((v) => (v === null ? "" : format(v))) },
        ],
        series,
        bands,
        hooks: {
          setCursor: [() => this.tell()],
          setSelect: [
            (plot) => {
              const { left, width } = plot.select;
              if (width < 4) return;
              const range: Range = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
              plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
              this.onRange(range);
            },
          ],
        },
      },
      this.data(),
      this.host,
    );
    this.tell();
  }

  /** The value under the cursor, or the newest one. */
  private tell(): void {
    const format = this.look.format ?? number;
    const index = this.plot?.cursor.idx;
    const x = index !== null && index !== undefined ? this.plot?.data[0][index] : undefined;
    const place = x === undefined ? "" : `${this.look.axis === "step" ? `step ${number(x)}` : this.look.axis === "clock" ? clock(x) : duration(x)}: `;
    const texts = this.lines.map((line) => {
      const at = x === undefined ? lastOf(line.mean) : nearest(line, x);
      if (at < 0) return "–";
      const mean = line.mean[at];
      const low = line.low?.[at];
      const high = line.high?.[at];
      const spread = x !== undefined && low !== null && low !== undefined && high !== null && high !== undefined && low !== high ? ` (${format(low)} to ${format(high)})` : "";
      return mean === null || mean === undefined ? "no number" : format(mean) + spread;
    });
    const many = this.lines.length > 1;
    this.value.replaceChildren(place, ...texts.flatMap((text, i) => [h("b", { class: many ? `key k${this.lines[i].key ?? i % 8}` : "", title: many ? this.lines[i].label : "" }, this.lines[i].short ? h("span", { class: "quiet" }, `${this.lines[i].short} `) : null, text), " "]));
    this.host.setAttribute("aria-label", `${this.title}: ${texts.join(", ")}. Plus and minus zoom, arrows move, zero shows all.`);
  }

  private readonly onKey = (event: KeyboardEvent): void => {
    const x = this.plot?.scales.x;
    if (!x || x.min === undefined || x.max === undefined || x.min === null || x.max === null) return;
    const size = x.max - x.min;
    const moves: Record<string, Range> = {
      "+": [x.min + size / 4, x.max - size / 4],
      "=": [x.min + size / 4, x.max - size / 4],
      "-": [x.min - size / 2, x.max + size / 2],
      ArrowLeft: [x.min - size / 4, x.max - size / 4],
      ArrowRight: [x.min + size / 4, x.max + size / 4],
      "0": null,
      Escape: null,
    };
    if (event.key in moves && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      this.onRange(moves[event.key]);
    }
  };
}

/** A moving average that gives the first points their whole weight. `strength` is from 0 (none) to 0.99. */
export function smooth(values: Values, strength: number): Values {
  if (strength <= 0) return values;
  let sum = 0;
  let weight = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    sum = strength * sum + (1 - strength) * value;
    weight = strength * weight + (1 - strength);
    return sum / weight;
  });
}

function lastOf(values: Values): number {
  let at = values.length - 1;
  while (at >= 0 && (values[at] === null || values[at] === undefined)) at -= 1;
  return at;
}

function nearest(line: Line, x: number): number {
  let low = 0;
  let high = line.x.length - 1;
  if (high < 0) return -1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (line.x[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low > 0 && x - line.x[low - 1] < line.x[low] - x ? low - 1 : low;
}
