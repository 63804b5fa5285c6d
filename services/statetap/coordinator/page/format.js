// Numbers for people. Units are SI, as the command line's.

const whole = new Intl.NumberFormat("en");

export const count = (n) => whole.format(n);

export function short(n) {
  return scaled(n, ["", " k", " M", " G", " T", " P"]);
}

export function bytes(n) {
  return scaled(n, [" B", " kB", " MB", " GB", " TB", " PB"]);
}

function scaled(n, units) {
  let unit = 0;
  while (Math.abs(n) >= 999.5 && unit < units.length - 1) {
    n /= 1000;
    unit += 1;
  }
  const digits = unit === 0 || n >= 99.95 ? 0 : n >= 9.995 ? 1 : 2;
  return n.toFixed(digits) + units[unit];
}

/** Seconds as the two units that matter. */
export function duration(seconds) {
  const s = Math.round(seconds);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

/** Unix time in the reader's own zone. */
export function time(unix) {
  return new Date(unix * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" });
}

export function percent(part, all) {
  if (!all) return "0 %";
  const value = (100 * part) / all;
  // 99.97 % is not all of it.
  return `${part < all ? Math.min(Math.floor(value * 10) / 10, 99.9).toFixed(1) : "100"} %`;
}

export const words = (code) => code.replaceAll("_", " ");

/** What holds a job up, as a sentence. Codes are those of the API's `bound`. */
export const BOUNDS = {
  prefill: "the engine's prefills",
  d2h: "copies from the GPU to the tap",
  tap: "space in the tap",
  commit: "check and commit (store)",
  no_engine: "no engine",
};

/** What ends a pause, by its reason. */
export const PAUSES = {
  user: "Somebody paused it: it waits for Resume.",
  low_disk: "It goes on by itself when there is space on the store.",
  engine_down: "It goes on by itself when the engine answers again.",
  no_engine: "It goes on by itself when an engine of its profile is live.",
  circuit_open: "Row after row failed with one cause: mend it, then Resume or Retry.",
  store_full: "It goes on by itself when rows are read and freed.",
};
