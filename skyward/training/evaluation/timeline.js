"use strict";
// Shows details under the pointer, zooms, and labels the bars that have room. Without it, titles show the details.
(() => {
  const tip = document.getElementById("tip"), card = document.querySelector(".timeline");
  if (!card) return;
  const scroll = card.querySelector(".scroll"), wide = card.querySelector(".wide-lanes");
  const axis = card.querySelector("svg.axis"), seconds = Number(card.dataset.seconds);
  const SVG = "http://www.w3.org/2000/svg";
  let zoom = 1;

  const words = value => {
    const [size, name] = value >= 5400 ? [3600, "h"] : value >= 90 ? [60, "min"] : value >= 1 || value === 0 ? [1, "s"] : [1e-3, "ms"];
    return Number((value / size).toPrecision(4)) + " " + name;
  };

  const clock = value => {
    const two = number => (number < 10 ? "0" : "") + number;
    const hours = Math.floor(value / 3600), minutes = Math.floor(value / 60) % 60, rest = Number((value % 60).toFixed(3));
    return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
  };

  const STEPS = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 18000, 36000, 86400, 172800];
  const steps = about => {
    const rough = seconds / about, power = 10 ** Math.floor(Math.log10(rough));
    const decimal = power * [1, 2, 5, 10].find(factor => power * factor >= rough * 0.999);
    return decimal < 1 ? decimal : STEPS.find(step => step >= rough) || decimal;
  };

  const ticks = () => {
    const step = steps(Math.max(2, Math.min(400, wide.clientWidth / 90)));
    axis.replaceChildren();
    wide.querySelectorAll("line.grid").forEach(line => line.remove());
    for (let at = 0; at <= seconds * 1.0001; at += step) {
      const share = 100 * at / seconds;
      const text = document.createElementNS(SVG, "text");
      text.setAttribute("x", share + "%");
      text.setAttribute("y", 14);
      text.setAttribute("class", share * wide.clientWidth < 2500 ? "first" : (100 - share) * wide.clientWidth < 2500 ? "last" : "tick");
      text.textContent = seconds < 90 ? words(at) : clock(at);
      axis.append(text);
      wide.querySelectorAll("svg.lane").forEach(lane => {
        const line = document.createElementNS(SVG, "line");
        for (const [name, value] of [["class", "grid"], ["x1", share + "%"], ["x2", share + "%"], ["y1", 0], ["y2", "100%"]])
          line.setAttribute(name, value);
        lane.prepend(line);
      });
    }
  };

  // Labels depend on pixels, so they are set again after each zoom and resize.
  const label = () => {
    wide.querySelectorAll("text.bar").forEach(text => text.remove());
    wide.querySelectorAll("svg.lane rect").forEach(bar => {
      const full = bar.dataset.text.split("\n")[0];
      const room = (parseFloat(bar.getAttribute("width")) / 100 * wide.clientWidth - 10) / 6.5;
      const name = [full, full.split(" ").pop()].find(words => words.length <= room);
      if (!name) return;
      const text = document.createElementNS(SVG, "text");
      for (const [key, value] of [["class", "bar"], ["x", bar.getAttribute("x")], ["dx", 5], ["y", Number(bar.getAttribute("y")) + 13]])
        text.setAttribute(key, value);
      text.textContent = name;
      bar.after(text);
    });
  };

  const widen = factor => {
    const middle = (scroll.scrollLeft + scroll.clientWidth / 2) / wide.clientWidth;
    zoom = Math.max(1, Math.min(256, zoom * factor));
    wide.style.width = 100 * zoom + "%";
    scroll.scrollLeft = middle * wide.clientWidth - scroll.clientWidth / 2;
    ticks();
    label();
  };

  card.querySelector(".zoom").hidden = false;
  card.querySelectorAll("[data-zoom]").forEach(button => button.addEventListener("click", () => widen(Number(button.dataset.zoom))));
  addEventListener("resize", () => { ticks(); label(); });
  ticks();

  card.querySelectorAll("svg.lane").forEach(lane => {
    // Titles move to the tip, because a browser shows a title after a second only, and never on touch.
    lane.querySelectorAll("rect").forEach(bar => {
      const title = bar.querySelector("title");
      bar.dataset.text = title.textContent;
      title.remove();
    });
    lane.addEventListener("pointermove", event => {
      const text = event.target.dataset && event.target.dataset.text;
      if (!text) { tip.style.display = "none"; return; }
      tip.textContent = text;
      tip.style.display = "block";
      const right = event.clientX + 16 + tip.offsetWidth > innerWidth;
      tip.style.left = Math.max(4, right ? event.clientX - 12 - tip.offsetWidth : event.clientX + 14) + "px";
      tip.style.top = Math.max(4, Math.min(innerHeight - tip.offsetHeight - 4, event.clientY + 12)) + "px";
    });
    lane.addEventListener("pointerleave", () => { tip.style.display = "none"; });
  });
  label();
})();
