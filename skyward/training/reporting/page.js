"use strict";
// Shows the values under the pointer. Text from the run is set as text, never as markup.
(() => {
  const charts = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");

  const words = (value, unit) => {
    if (value === null || value === undefined) return "not finite";
    if (unit === "bytes") {
      for (const [size, name] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]])
        if (Math.abs(value) >= size) return (value / size).toPrecision(4) + " " + name;
      return value + " B";
    }
    if (Number.isInteger(value)) return value.toLocaleString("en");
    return Math.abs(value) >= 1000 && Math.abs(value) < 1e15 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(5)));
  };

  const show = (event, lines) => {
    tip.replaceChildren();
    for (const [colour, text] of lines) {
      const line = document.createElement("div");
      if (colour !== null) {
        const mark = document.createElement("i");
        mark.className = "c" + colour;
        line.append(mark);
      }
      line.append(text);
      tip.append(line);
    }
    tip.style.display = "block";
    const right = event.clientX + 16 + tip.offsetWidth > innerWidth;
    tip.style.left = (right ? event.clientX - 12 - tip.offsetWidth : event.clientX + 14) + "px";
    tip.style.top = Math.max(4, Math.min(innerHeight - tip.offsetHeight - 4, event.clientY + 12)) + "px";
  };

  const nearest = (points, step) => {
    let low = 0, high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] <= step) low = middle; else high = middle;
    }
    return Math.abs(points[low][0] - step) <= Math.abs(points[high][0] - step) ? points[low] : points[high];
  };

  const at = (svg, event) => {
    const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
    return [(event.clientX - box.left) * view.width / box.width, (event.clientY - box.top) * view.height / box.height];
  };

  const onLines = (svg, chart) => event => {
    const [low, high, begin, end] = chart.x;
    const pointed = low + (at(svg, event)[0] - begin) / (end - begin) * (high - low);
    const hits = chart.series.map(line => nearest(line.points, pointed));
    const step = hits.reduce((best, hit) => Math.abs(hit[0] - pointed) < Math.abs(best - pointed) ? hit[0] : best, hits[0][0]);
    const x = high > low ? begin + (end - begin) * (step - low) / (high - low) : (begin + end) / 2;
    const cursor = svg.querySelector(".cursor");
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    const lines = [[null, "step " + step.toLocaleString("en")]];
    chart.series.forEach((line, index) => {
      if (hits[index][0] === step) lines.push([line.colour, line.name + ": " + words(hits[index][1], chart.unit)]);
    });
    show(event, lines);
  };

  const onHeat = (svg, chart) => event => {
    const [left, top, wide, cell] = chart.at, [x, y] = at(svg, event);
    const column = Math.floor((x - left) / wide), row = Math.floor((y - top) / cell);
    const name = chart.names[row], step = chart.steps[column];
    if (name === undefined || step === undefined) { tip.style.display = "none"; return; }
    const value = chart.values[row][column];
    show(event, [[null, name], [null, "step " + step.toLocaleString("en") + ": " + (value === null ? "none" : words(value, ""))]]);
  };

  document.querySelectorAll("[data-chart]").forEach(card => {
    const chart = charts[Number(card.dataset.chart)], svg = card.querySelector("svg");
    svg.addEventListener("pointermove", chart.kind === "heat" ? onHeat(svg, chart) : onLines(svg, chart));
    svg.addEventListener("pointerleave", () => {
      tip.style.display = "none";
      const cursor = svg.querySelector(".cursor");
      if (cursor) { cursor.setAttribute("x1", -9); cursor.setAttribute("x2", -9); }
    });
  });
})();
