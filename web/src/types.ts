// What the server answers.

export interface Row {
  id: string;
  name: string;
  status: string;
  exit_code: number | null;
  created: number;
  ended: number | null;
  seconds: number | null;
  workers: number | null;
  min_workers: number | null;
  max_workers: number | null;
  step: number | null;
  loss: number | null;
  items: [number, number | null] | null;
  command: string;
  host: string;
}

export interface Page {
  total: number;
  matching: number;
  reading: [number, number] | null;
  statuses: Record<string, number>;
  offset: number;
  rows: Row[];
}

export interface Setting { name: string; value: string; source: string }
export interface Cause { message: string; why: string; hint: string; where: string; rank: number | null; step: number | null }

export interface Run extends Row {
  path: string;
  pid: number | null;
  reproduce: string;
  resume: string;
  versions: Record<string, string>;
  job: { name: string; value: string }[];
  settings: Setting[];
  cause: Cause | null;
  ranks: { rank: number; bytes: number }[];
  num_events: number;
  series: string[];
}

export interface Curve { name: string; label: string; axis: number; mean: (number | null)[]; low?: (number | null)[]; high?: (number | null)[]; bad: number }
export interface Curves { axes: { steps: number[]; times: number[] }[]; series: Curve[] }

export interface Heat { of: string; first_step: number; last_step: number; column_steps: number; ranks: number[]; seconds: (number | null)[][] }

export interface Happening { kind: string; time: number; rank: number | null; step: number | null; generation: number; text: string; why: string; hint: string; severity: string; number?: number }
export interface Era { generation: number; time: number; until: number; workers: number; members: string[]; joined: string[]; reason: string }
export interface World { start: number; end: number; is_elastic: boolean; most: number | null; eras: Era[]; marks: Happening[]; num_marks: number }

export interface Checkpoint { folder: string; name: string; step: number; saved_at: number | null; num_bytes: number; generation: number; is_stale: boolean; problem: string; is_read?: boolean }

export interface NodeFacts {
  node: string;
  time: number;
  now: Record<string, number>;
  times: number[];
  curves: Record<string, number[]>;
  workers: Record<string, Record<string, number>>;
  runs?: { id: string; name: string }[];
}

export interface View { news?: (changed: string[]) => void; close?: () => void }
