// Tables of thousands of rows: only the rows in sight are in the document.

const ROW_HEIGHT = 26;
const ROWS_BEYOND = 12;

class DataTable {
  // columns: {title, value(row), text(row)?, width, number?, kind?}; filters: {label, value(row)}.
  constructor({ name, rows, columns, filters, search, onPick }) {
    Object.assign(this, { name, rows, columns, onPick, sorted: null, descending: false });
    this.choices = filters.map((filter) => this.makeChoice(filter));
    this.haystacks = new Map(rows.map((row) => [row, search(row).toLowerCase()]));
    this.panel = element("div", { class: "panel", role: "tabpanel", "aria-label": name });
    this.build();
    this.update();
  }

  build() {
    this.input = element("input", {
      type: "search",
      placeholder: "Filter by text…",
      "aria-label": `Filter ${this.name}`,
      spellcheck: "false",
    });
    this.input.addEventListener("input", () => this.update());
    this.status = element("span", { class: "status", role: "status" });
    const bar = element("div", { class: "filters" });
    bar.append(this.input, ...this.choices.map((choice) => choice.select), this.status);
    this.view = element("div", { class: "rows", tabindex: 0, "aria-label": this.name });
    this.view.addEventListener("scroll", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.view);
    const table = element("table");
    this.body = element("tbody");
    table.append(this.makeHead(), this.body);
    this.table = table;
    this.view.append(table);
    this.panel.append(bar, this.view);
  }

  makeChoice({ label, value }) {
    const select = element("select", { "aria-label": label });
    const numbers = new Map();
    for (const row of this.rows) numbers.set(value(row), (numbers.get(value(row)) ?? 0) + 1);
    select.append(element("option", { value: "" }, `all ${label}s`));
    for (const [each, number] of [...numbers].sort((a, b) => COLLATOR.compare(a[0], b[0]))) {
      select.append(element("option", { value: each }, `${each} (${count(number)})`));
    }
    select.addEventListener("change", () => this.update());
    return { select, value };
  }

  makeHead() {
    const head = element("thead");
    const row = element("tr");
    for (const column of this.columns) {
      const cell = element("th", { scope: "col", class: column.number ? "number" : "" });
      cell.style.width = column.width;
      const button = element("button", {}, column.title);
      button.addEventListener("click", () => this.sortBy(column));
      cell.append(button);
      column.cell = cell;
      row.append(cell);
    }
    head.append(row);
    return head;
  }

  sortBy(column) {
    this.descending = this.sorted === column ? !this.descending : Boolean(column.number);
    this.sorted = column;
    for (const each of this.columns) each.cell.removeAttribute("aria-sort");
    column.cell.setAttribute("aria-sort", this.descending ? "descending" : "ascending");
    this.update();
  }

  filterBy(text) {
    this.input.value = text;
    this.update();
  }

  // All words must occur.
  update() {
    const words = this.input.value.toLowerCase().split(/\s+/).filter(Boolean);
    const chosen = this.choices.filter((choice) => choice.select.value);
    this.found = this.rows.filter(
      (row) =>
        chosen.every((choice) => choice.value(row) === choice.select.value) &&
        words.every((word) => this.haystacks.get(row).includes(word)),
    );
    if (this.sorted) this.found.sort((a, b) => this.compare(a, b));
    this.status.textContent = `${count(this.found.length)} of ${count(this.rows.length)}`;
    this.table.setAttribute("aria-rowcount", this.found.length + 1);
    this.view.scrollTop = 0;
    this.draw();
  }

  // What is unknown comes last, whichever way.
  compare(a, b) {
    const [left, right] = [this.sorted.value(a), this.sorted.value(b)];
    if (left === null || right === null) return (left === null) - (right === null);
    const order = this.sorted.number ? left - right : COLLATOR.compare(left, right);
    return this.descending ? -order : order;
  }

  draw() {
    const first = Math.max(0, Math.floor(this.view.scrollTop / ROW_HEIGHT) - ROWS_BEYOND);
    const inSight = Math.ceil((this.view.clientHeight || 300) / ROW_HEIGHT) + 2 * ROWS_BEYOND;
    const rows = this.found.slice(first, first + inSight);
    this.body.replaceChildren(
      spacer(first),
      ...rows.map((row, i) => this.makeRow(row, first + i)),
      spacer(this.found.length - first - rows.length),
    );
  }

  makeRow(row, position) {
    const made = element("tr", { tabindex: 0, "aria-rowindex": position + 2 });
    for (const column of this.columns) {
      const text = (column.text ?? column.value)(row) ?? "";
      const cell = element("td", { class: column.number ? "number" : "", title: text });
      cell.append(column.color ? chip(text, column.color(row)) : document.createTextNode(text));
      made.append(cell);
    }
    made.addEventListener("click", () => this.onPick(row));
    made.addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.onPick(row);
    });
    return made;
  }
}

function spacer(rows) {
  const made = element("tr", { "aria-hidden": "true", class: "spacer" });
  made.style.height = `${rows * ROW_HEIGHT}px`;
  return made;
}

function nodeTable(model, onPick) {
  const known = model.nodes.some((node) => node.cost !== null);
  const cost = {
    title: "Time",
    value: (node) => node.cost,
    text: (node) => secondsText(node.cost),
    width: "9%",
    number: true,
  };
  return new DataTable({
    name: "Nodes",
    rows: model.nodes,
    onPick,
    search: (node) => [place(node.scope, node.name), node.op, node.reason].join("\n"),
    filters: [
      { label: "op", value: (node) => node.op },
      { label: "dtype", value: (node) => node.dtype },
      { label: "rule", value: (node) => node.rule },
    ],
    columns: [
      { title: "Node", value: (node) => place(node.scope, node.name), width: "30%" },
      { title: "Op", value: (node) => node.op, width: "13%" },
      { title: "Dtype", value: (node) => node.dtype, color: (node) => node.color, width: "9%" },
      { title: "Rule", value: (node) => node.rule, width: "9%" },
      { title: "Reason", value: (node) => node.reason, width: known ? "18%" : "27%" },
      ...(known ? [cost] : []),
      { title: "Casts in", value: (node) => node.castsIn.length, width: "7%", number: true },
      { title: "out", value: (node) => node.castsOut.length, width: "5%", number: true },
    ],
  });
}

function castTable(model, onPick) {
  return new DataTable({
    name: "Casts",
    rows: model.plan.casts,
    onPick,
    search: (cast) => [place(cast.scope, cast.tensor), ...cast.users].join("\n"),
    filters: [{ label: "dtype", value: (cast) => `${cast.from} → ${cast.to}` }],
    columns: [
      { title: "Tensor", value: (cast) => place(cast.scope, cast.tensor), width: "38%" },
      { title: "From", value: (cast) => cast.from, width: "8%" },
      {
        title: "To",
        value: (cast) => cast.to,
        width: "8%",
        color: (cast) => (cast.to === model.plan.dtype ? "low" : "float32"),
      },
      {
        title: "Bytes moved",
        value: (cast) => cast.bytes,
        text: (cast) => bytesText(cast.bytes),
        width: "10%",
        number: true,
      },
      { title: "Consumers", value: (cast) => cast.users.length, width: "8%", number: true },
      { title: "Used by", value: (cast) => cast.users.join(", "), width: "28%" },
    ],
  });
}

function ruleTable(model, onPick) {
  const rules = new Map();
  for (const node of model.nodes) {
    const key = pairKey(node.rule, node.dtype);
    if (!rules.has(key)) {
      rules.set(key, {
        rule: node.rule,
        dtype: node.dtype,
        color: node.color,
        nodes: 0,
        ops: new Map(),
      });
    }
    const rule = rules.get(key);
    rule.nodes += 1;
    rule.ops.set(node.op, (rule.ops.get(node.op) ?? 0) + 1);
  }
  const rows = [...rules.values()].sort((a, b) => b.nodes - a.nodes);
  return new DataTable({
    name: "Rules",
    rows,
    onPick,
    search: (rule) => [rule.rule, ...rule.ops.keys()].join("\n"),
    filters: [{ label: "dtype", value: (rule) => rule.dtype }],
    columns: [
      { title: "Rule", value: (rule) => rule.rule, width: "15%" },
      { title: "Dtype", value: (rule) => rule.dtype, color: (rule) => rule.color, width: "10%" },
      {
        title: "Nodes",
        value: (rule) => rule.nodes,
        text: (rule) => count(rule.nodes),
        width: "8%",
        number: true,
      },
      { title: "Most frequent ops", value: (rule) => frequent(rule.ops), width: "67%" },
    ],
  });
}

function frequent(numbers) {
  const sorted = [...numbers].sort((a, b) => b[1] - a[1] || COLLATOR.compare(a[0], b[0]));
  return sorted.map(([name, number]) => `${name} ×${count(number)}`).join(", ");
}
