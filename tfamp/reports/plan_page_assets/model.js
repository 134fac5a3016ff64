// The plan's nodes and Casts with what is next to each, the totals, and the panel of details.

const MAX_LISTED = 40;
const COLLATOR = new Intl.Collator("en", { numeric: true });

const byId = (id) => document.getElementById(id);
const count = (number) => number.toLocaleString("en-US");
const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
const place = (scope, name) => (scope ? `${scope}: ${name}` : name);
// JSON text of two strings: unlike strings joined by a sign, no two pairs give the same text.
const pairKey = (scope, name) => JSON.stringify([scope, name]);

// Text goes in as text, never as markup: the names are whatever the graph's author wrote.
function element(name, attributes = {}, text = null) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
}

// A name that breaks after its scopes.
function nameElement(tag, attributes, name) {
  const made = element(tag, attributes);
  name.split(/(?<=\/)/).forEach((part, i) => made.append(...(i ? [element("wbr")] : []), part));
  return made;
}

const chip = (text, color) => element("span", { class: `chip ${color}` }, text);

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

function secondsText(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds >= 1) return `${seconds.toPrecision(3)} s`;
  return seconds >= 1e-3
    ? `${(seconds * 1e3).toPrecision(3)} ms`
    : `${(seconds * 1e6).toPrecision(3)} µs`;
}

// Links every node with its neighbours and with the Casts next to it.
function buildModel(plan) {
  const nodes = plan.nodes.map((node) => ({
    ...node,
    color: node.rule === "as given" ? "given" : node.dtype === plan.dtype ? "low" : "float32",
    feeds: [],
    castsIn: [],
    castsOut: [],
  }));
  const byName = new Map(nodes.map((node) => [pairKey(node.scope, node.name), node]));
  for (const node of nodes)
    for (const name of node.inputs) byName.get(pairKey(node.scope, name))?.feeds.push(node.name);
  for (const cast of plan.casts) {
    byName.get(pairKey(cast.scope, cast.producer))?.castsOut.push(cast);
    cast.users = [...new Set(cast.consumers.map(([name]) => name))];
    for (const name of cast.users) byName.get(pairKey(cast.scope, name))?.castsIn.push(cast);
  }
  return { plan, nodes, byName };
}

function drawTotals({ plan, nodes }) {
  const { summary } = plan;
  const colored = (color) => {
    const number = nodes.filter((node) => node.color === color).length;
    const share = nodes.length ? ` (${((100 * number) / nodes.length).toFixed(1)}%)` : "";
    return [`${count(number)}${share}`, number];
  };
  const unknown = summary.casts_of_unknown_size;
  const speedUp = summary.estimated_speed_up;
  const [given, isGiven] = colored("given");
  const cards = [
    [count(nodes.length), "float nodes", ""],
    [colored("low")[0], `converted to ${plan.dtype}`, "low"],
    [colored("float32")[0], "float32", "float32"],
    ...(isGiven ? [[given, `in ${plan.dtype} as given`, "given"]] : []),
    [count(summary.casts), "Casts inserted", ""],
    [
      bytesText(summary.cast_bytes),
      unknown ? `moved by Casts, ${count(unknown)} of unknown size` : "moved by Casts",
      "",
    ],
    [speedUp == null ? "not known" : `${speedUp.toFixed(2)}×`, "estimated speed-up", ""],
  ];
  const list = element("ul");
  for (const [value, words, color] of cards) {
    const card = element("li", { class: color });
    card.append(element("strong", {}, value), element("span", {}, words));
    list.append(card);
  }
  byId("totals").append(list);
}

// The panel with all about the node or Cast that was chosen last.
class DetailsPanel {
  constructor(model, panel, reveal) {
    Object.assign(this, { model, panel, reveal });
    this.say("Nothing selected", "Choose a node for the reason of its dtype, or a Cast.");
  }

  say(title, text) {
    this.panel.replaceChildren(element("h2", {}, title), element("p", {}, text));
  }

  showNode(node) {
    const dtype = element("dd");
    dtype.append(chip(node.dtype, node.color));
    this.fill(
      node.name,
      [
        ["Op", node.op],
        ["Dtype", dtype],
        ["Reason", node.reason],
        ["Rule", node.rule],
        ["Function", node.scope],
        ["Estimated time", secondsText(node.cost)],
      ],
      this.castList("Casts in", node.castsIn),
      this.castList("Casts out", node.castsOut),
      this.nodeList("Takes from", node.scope, node.inputs),
      this.nodeList("Feeds", node.scope, node.feeds),
    );
  }

  showCast(cast) {
    this.fill(
      `Cast of ${cast.tensor}`,
      [
        ["From", cast.from],
        ["To", cast.to],
        ["Bytes moved", bytesText(cast.bytes)],
        ["Function", cast.scope],
      ],
      this.nodeList("Made by", cast.scope, [cast.producer]),
      this.nodeList("Used by", cast.scope, cast.users),
    );
  }

  fill(title, facts, ...sections) {
    const list = element("dl");
    for (const [term, value] of facts.filter(([, value]) => value)) {
      const shown = typeof value === "string" ? element("dd", {}, value) : value;
      list.append(element("dt", {}, term), shown);
    }
    this.panel.replaceChildren(nameElement("h2", { class: "name" }, title), list, ...sections);
    this.panel.scrollTop = 0;
  }

  castList(title, casts) {
    return this.section(title, casts, (cast) => [
      this.link(cast.tensor, () => this.showCast(cast)),
      `${cast.from} → ${cast.to}, ${bytesText(cast.bytes)}, for ${plural(cast.users.length, "node")}`,
    ]);
  }

  nodeList(title, scope, names) {
    return this.section(title, names, (name) => {
      const node = this.model.byName.get(pairKey(scope, name));
      return node
        ? [this.link(name, () => this.reveal(node)), `${node.op}, ${node.dtype}`]
        : [nameElement("span", {}, name), "does not compute with floats, or is an argument"];
    });
  }

  section(title, entries, describe) {
    const section = element("section");
    if (!entries.length) return section;
    const list = element("ul");
    for (const each of entries.slice(0, MAX_LISTED)) {
      const [name, text] = describe(each);
      const entry = element("li");
      entry.append(name, element("small", {}, text));
      list.append(entry);
    }
    section.append(element("h3", {}, `${title}: ${count(entries.length)}`), list);
    if (entries.length > MAX_LISTED)
      section.append(element("p", {}, `and ${count(entries.length - MAX_LISTED)} more`));
    return section;
  }

  link(text, action) {
    const button = nameElement("button", { class: "link" }, text);
    button.addEventListener("click", action);
    return button;
  }
}
