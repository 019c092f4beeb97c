// Curves over the last minutes, drawn as SVG; a second without data is a gap, not a zero.
import { svg, element, text } from "./rows.js";

const WIDTH = 600;
const HEIGHT = 100;

/** A round number at or above a value: the top of a scale. */
export function roundTop(value) {
  if (value <= 1) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 6, 8, 10].map((step) => step * power).find((top) => top >= value); // their halves are round too
}

/** A path of `[x, y]`, broken where seconds are missing. */
function path(points, down) {
  let drawn = "";
  let before = null;
  let start = null;
  for (const [x, y] of points) {
    if (before === null || x - before > 3) {
      if (down && before !== null) drawn += `L${before} ${HEIGHT}L${start} ${HEIGHT}Z`;
      drawn += `M${x} ${y.toFixed(2)}`;
      start = x;
    } else {
      drawn += `L${x} ${y.toFixed(2)}`;
    }
    before = x;
  }
  if (down && before !== null) drawn += `L${before} ${HEIGHT}L${start} ${HEIGHT}Z`;
  return drawn;
}

export class Chart {
  /** `curves`: {name, read(point), area}; drawn in this order. */
  constructor(plot, curves, { least = 1, none }) {
    this.curves = curves;
    this.top = 0;
    this.least = least;
    this.paths = new Map();
    const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    for (const y of [0, HEIGHT / 2, HEIGHT]) {
      drawing.append(svg("line", { class: "grid-line", x1: 0, x2: WIDTH, y1: y, y2: y }));
    }
    for (const curve of curves) {
      const area = curve.area ? svg("path", { class: `area ${curve.name}` }) : null;
      const line = svg("path", { class: `curve ${curve.name}` });
      if (area) drawing.append(area);
      drawing.append(line);
      this.paths.set(curve.name, { area, line });
    }
    plot.append(drawing);
    this.marks = [1, 0.5, 0].map((share) => {
      const mark = element("span", "y");
      mark.style.top = `calc((100% - 1.3rem) * ${1 - share})`;
      plot.append(mark);
      return { mark, share };
    });
    this.times = [0, 2, 4, 6, 8, 10].map((minutes) => {
      const mark = element("span", "x", minutes === 10 ? "now" : `−${10 - minutes} min`);
      mark.style.left = `calc(3.2rem + (100% - 3.2rem) * ${minutes / 10})`;
      if (minutes === 10) mark.style.transform = "translateX(-100%)";
      plot.append(mark);
      return mark;
    });
    this.none = element("span", "none", none);
    plot.append(this.none);
  }

  draw(points, now) {
    const recent = points.filter((point) => point[0] > now - WIDTH);
    const most = Math.max(this.least, ...recent.flatMap((point) => this.curves.map((curve) => curve.read(point))));
    // Up at once, down only when there is much room: a scale that moves all the time is hard to read.
    if (most > this.top || most < this.top * 0.3) this.top = roundTop(most);
    for (const { mark, share } of this.marks) text(mark, scaleText(this.top * share));
    for (const curve of this.curves) {
      const at = recent.map((point) => [point[0] - now + WIDTH, HEIGHT * (1 - curve.read(point) / this.top)]);
      const { area, line } = this.paths.get(curve.name);
      line.setAttribute("d", path(at, false));
      if (area) area.setAttribute("d", path(at, true));
    }
    this.none.hidden = recent.length > 1;
    this.none.style.display = recent.length > 1 ? "none" : "";
  }
}

function scaleText(value) {
  return Number.isInteger(value) ? String(value) : value.toFixed(value < 10 ? 1 : 0);
}

/** A small curve without a scale. */
export function spark() {
  const drawing = svg("svg", { class: "spark", viewBox: `0 0 120 ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  drawing.append(svg("path", { class: "area done" }), svg("path", { class: "curve done" }));
  return drawing;
}

export function drawSpark(drawing, values) {
  const most = Math.max(1, ...values);
  const at = values.map((value, index) => [index, HEIGHT * (1 - (value / most) * 0.9) - 3]);
  drawing.firstChild.setAttribute("d", path(at, true));
  drawing.lastChild.setAttribute("d", path(at, false));
}
