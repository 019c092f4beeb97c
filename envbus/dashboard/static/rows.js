// Rows of tables and lists that are kept: a row is made once per key, moved if it must be, and only what changed is written.

export function text(node, value) {
  if (node.textContent !== value) node.textContent = value;
}

export function attribute(node, name, value) {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

export function element(tag, className = "", content = "") {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (content) node.textContent = content;
  return node;
}

/** Make the children of a parent match items. `make(item)` returns a node, `fill(node, item)` writes it. */
export function keyed(parent, items, key, make, fill) {
  const known = (parent.known ??= new Map());
  const left = new Set(known.keys());
  let place = parent.firstChild;
  for (const item of items) {
    const name = key(item);
    left.delete(name);
    let node = known.get(name);
    if (!node) known.set(name, (node = make(item)));
    fill(node, item);
    if (node === place) place = place.nextSibling;
    else parent.insertBefore(node, place);
  }
  for (const name of left) {
    known.get(name).remove();
    known.delete(name);
  }
}

/** A table row with so many cells; `classes` by position. */
export function row(count, classes = {}) {
  const node = element("tr");
  for (let index = 0; index < count; index++) node.append(element("td", classes[index] ?? ""));
  return node;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

/** The shape of a state. */
export function shape(state) {
  const node = svg("svg", { class: `shape s-${state}`, role: "img", "aria-label": state });
  node.append(svg("use", { href: `#${state}` }), svg("title"));
  node.lastChild.textContent = state;
  return node;
}

/** A bar with a count beside it: `3 / 4`. */
export function useBar(cell) {
  const box = element("div", "use");
  box.append(bar(), element("span", "count"));
  cell.append(box);
}

export function bar() {
  const node = element("div", "bar");
  node.append(element("i"));
  return node;
}

export function fillBar(node, share) {
  node.firstChild.style.width = `${Math.min(100, Math.max(0, share * 100)).toFixed(1)}%`;
}
