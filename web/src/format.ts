// Numbers, durations and dates as people read them.

export function count(value: number): string {
  return Math.round(value).toLocaleString("en-US");
}

export function number(value: number | string | null | undefined): string {
  if (value === null || value === undefined) return "–";
  const x = Number(value);
  if (!Number.isFinite(x)) return String(value);
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 1e6) return `${short(x / 1e6)}M`;
  if (size >= 1e4) return `${short(x / 1e3)}k`;
  if (size < 1e-3) return x.toExponential(2);
  return short(x);
}

function short(x: number): string {
  return String(Number(x.toPrecision(4)));
}

export function duration(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  const all = Math.max(0, Math.round(seconds));
  const pad = (x: number): string => String(x).padStart(2, "0");
  if (all >= 2 * 86400) return `${Math.floor(all / 86400)}d ${Math.floor((all % 86400) / 3600)}h`;
  if (all >= 3600) return `${Math.floor(all / 3600)}:${pad(Math.floor((all % 3600) / 60))}:${pad(all % 60)}`;
  return `${Math.floor(all / 60)}:${pad(all % 60)}`;
}

/** A short time with its unit: `16.4 ms`. */
export function brief(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  const size = Math.abs(seconds);
  if (size < 1e-9) return "0 s";
  if (size < 1e-3) return `${(seconds * 1e6).toPrecision(3)} µs`;
  if (size < 1) return `${(seconds * 1e3).toPrecision(3)} ms`;
  return size < 100 ? `${seconds.toPrecision(3)} s` : duration(seconds);
}

/** Memory as `--memory` takes it: powers of two. */
export function gib(value: number): string {
  const size = value / 2 ** 30;
  return `${size < 999.5 ? Number(size.toPrecision(3)) : count(size)} GiB`;
}

export function bytes(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KB", "MB", "GB", "TB"];
  let x = value;
  let unit = 0;
  while (Math.abs(x) >= 1000 && unit < units.length - 1) {
    x /= 1000;
    unit += 1;
  }
  return `${unit === 0 ? Math.round(x) : Number(x.toPrecision(3))} ${units[unit]}`;
}

export function percent(share: number): string {
  return `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)} %`;
}

export function clock(time: number, isPrecise = false): string {
  const date = new Date(1000 * time);
  const day = new Intl.DateTimeFormat("en-CA", { year: "numeric", month: "2-digit", day: "2-digit" }).format(date);
  const hour = date.toLocaleTimeString("en-GB", { hour12: false });
  return isPrecise ? `${day} ${hour}.${String(date.getMilliseconds()).padStart(3, "0")}` : `${day} ${hour}`;
}

/** The time of day, to the second where neighbours are that close. */
export function hour(time: number, step: number): string {
  const text = new Date(1000 * time).toLocaleTimeString("en-GB", { hour12: false });
  if (step >= 86400) return clock(time).slice(5, 10);
  return step >= 60 ? text.slice(0, 5) : text;
}

export function ago(time: number): string {
  const seconds = Date.now() / 1000 - time;
  if (seconds < 60) return "just now";
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  if (seconds < 2 * 86400) return "yesterday";
  return `${Math.floor(seconds / 86400)} days ago`;
}
