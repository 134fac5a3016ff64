// Elements, and the shapes the drawing is made of.

const SVG = document.getElementById("canvas").namespaceURI;

function element(name, attributes = {}, text = null) {
  const made = document.createElement(name);
  return dress(made, attributes, text);
}

function svgElement(name, attributes = {}, text = null) {
  return dress(document.createElementNS(SVG, name), attributes, text);
}

// Text goes in as text, never as markup: the names are whatever the graph's author wrote.
function dress(made, attributes, text) {
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
}

// A name that breaks behind its scopes.
function nameElement(tag, attributes, name) {
  const made = element(tag, attributes);
  name.split(/(?<=\/)/).forEach((part, i) => made.append(...(i ? [element("wbr")] : []), part));
  return made;
}

const measureText = (() => {
  const context = document.createElement("canvas").getContext("2d");
  const widths = new Map();
  return (text, font) => {
    const key = pairKey(font, text);
    if (!widths.has(key)) {
      context.font = font;
      widths.set(key, context.measureText(text).width);
    }
    return widths.get(key);
  };
})();
const LABEL_FONT = "600 12px system-ui, sans-serif";
const SMALL_FONT = "11px system-ui, sans-serif";

function chip(text, color) {
  return element("span", { class: `chip ${color}` }, text);
}

// Which part of a group has which colour.
function shareBar(item, x, y, width) {
  const bar = svgElement("g", { class: "share" });
  let left = x;
  for (const [color, number] of Object.entries(item.counts)) {
    if (!number) continue;
    const part = (width * number) / item.size;
    bar.append(svgElement("rect", { class: color, x: left, y, width: part, height: 5 }));
    left += part;
  }
  return bar;
}

function arrowHead() {
  const marker = svgElement("marker", {
    id: "arrow",
    viewBox: "0 0 8 8",
    refX: 7,
    refY: 4,
    markerWidth: 7,
    markerHeight: 7,
    markerUnits: "userSpaceOnUse",
    orient: "auto",
  });
  marker.append(svgElement("path", { d: "M0,0.8 L8,4 L0,7.2 z", class: "arrow-head" }));
  const defs = svgElement("defs");
  defs.append(marker);
  return defs;
}

// Straight where it passes a row, bent between rows.
function curve(points, dx, dy) {
  const at = ([x, y]) => `${(x + dx).toFixed(1)},${(y + dy).toFixed(1)}`;
  let d = `M${at(points[0])}`;
  for (let i = 1; i < points.length; i += 1) {
    const [from, to] = [points[i - 1], points[i]];
    const middle = (from[1] + to[1]) / 2;
    d +=
      from[0] === to[0]
        ? ` L${at(to)}`
        : ` C${at([from[0], middle])} ${at([to[0], middle])} ${at(to)}`;
  }
  return d;
}

function straightCurve(from, to) {
  const start = [from.x + from.w / 2, from.y + from.h];
  const end = [to.x + to.w / 2, to.y];
  const bow = Math.max(24, Math.abs(end[1] - start[1]) / 2);
  return `M${start} C${start[0]},${start[1] + bow} ${end[0]},${end[1] - bow} ${end}`;
}
