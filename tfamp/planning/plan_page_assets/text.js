// Numbers and names as people read them.

const MAX_LABEL = 30;
const SHORT_DTYPES = { float32: "f32", float16: "f16", bfloat16: "bf16" };
const COLLATOR = new Intl.Collator("en", { numeric: true });

const shortDtype = (dtype) => SHORT_DTYPES[dtype] ?? dtype;
const count = (number) => number.toLocaleString("en-US");
const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
const place = (scope, name) => (scope ? `${scope}: ${name}` : name);
// JSON text of two strings: unlike joined by a sign, no two pairs give the same.
const pairKey = (scope, name) => JSON.stringify([scope, name]);

function bytesText(bytes) {
  if (bytes === null) return "size unknown";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) {
    bytes /= 1024;
    unit += 1;
  }
  return `${unit && bytes < 100 ? bytes.toFixed(1) : Math.round(bytes)} ${units[unit]}`;
}

function castBytes(casts) {
  const known = casts.filter((cast) => cast.bytes !== null);
  const unknown = casts.length - known.length;
  if (!known.length) return bytesText(null);
  const sum = bytesText(known.reduce((total, cast) => total + cast.bytes, 0));
  return unknown ? `${sum} + ${unknown} unknown` : sum;
}

function secondsText(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds >= 1) return `${seconds.toPrecision(3)} s`;
  return seconds >= 1e-3
    ? `${(seconds * 1e3).toPrecision(3)} ms`
    : `${(seconds * 1e6).toPrecision(3)} µs`;
}

function costSource(node) {
  if (node.cost === null || node.cost === undefined) return "";
  return node.measured ? "measured" : "estimated";
}

function shorten(text, most = MAX_LABEL) {
  if (text.length <= most) return text;
  const head = Math.ceil((most - 1) * 0.6);
  return `${text.slice(0, head)}…${text.slice(text.length - (most - 1 - head))}`;
}

function frequent(numbers, most) {
  const sorted = [...numbers].sort((a, b) => b[1] - a[1] || COLLATOR.compare(a[0], b[0]));
  const rest = sorted.length - most;
  const text = sorted
    .slice(0, most)
    .map(([name, number]) => `${name} ×${count(number)}`)
    .join(", ");
  return rest > 0 ? `${text}, ${rest} more` : text;
}
