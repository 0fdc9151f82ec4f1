// "Watch it learn": a slider over the evaluations of two runs. Curves with a cursor, and the answers to the same prompts.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
  const root = document.querySelector(".watch");
  if (!root) return;
  const runs = JSON.parse(document.getElementById("runs").textContent);
  const { updates, prompts, names, charts } = runs;
  const [slider, output, play] = ["input", "output", ".play"].map((what) => root.querySelector(what));
  const WIDTH = 320, HEIGHT = 170, LEFT = 34, RIGHT = 14, TOP = 8, BOTTOM = 22;
  const x = (update) => LEFT + (update / updates.at(-1)) * (WIDTH - LEFT - RIGHT);

  function svg(name, attributes, parent) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return parent.appendChild(element);
  }

  function html(name, className, text, parent) {
    const element = document.createElement(name);
    element.className = className;
    element.textContent = text;
    return parent.appendChild(element);
  }

  function chart(name) {
    const all = Object.keys(names).flatMap((run) => runs[run][name]);
    const step = [0.2, 0.5, 1, 2, 5, 10, 20, 50, 100].find((size) => (Math.max(...all) - Math.min(...all)) / size <= 6) ?? 200;
    const low = Math.floor(Math.min(...all) / step) * step, high = Math.ceil(Math.max(...all) / step) * step;
    const y = (value) => TOP + (1 - (value - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
    const figure = html("figure", "chart", "", root.querySelector(".charts"));
    html("figcaption", "", charts[name], figure);
    const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": charts[name] }, figure);
    for (let i = 0; low + i * step <= high + 1e-9; i++) {
      const value = Number((low + i * step).toFixed(1));
      svg("line", { class: value ? "grid" : "zero", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }, picture);
      svg("text", { x: LEFT - 4, y: y(value) + 3, "text-anchor": "end" }, picture).textContent = value;
    }
    for (let update = 0; update <= updates.at(-1); update += 100) {
      svg("text", { x: x(update), y: HEIGHT - 6, "text-anchor": "middle" }, picture).textContent = update;
    }
    const cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM }, picture);
    const marks = Object.keys(names).map((run) => {
      const points = runs[run][name].map((value, i) => `${x(updates[i])},${y(value)}`).join(" ");
      svg("polyline", { class: run, points }, picture);
      const dot = svg("circle", { class: run, r: 3.5 }, picture);
      const said = html("span", `value ${run}`, "", figure);
      return (i) => {
        dot.setAttribute("cx", x(updates[i]));
        dot.setAttribute("cy", y(runs[run][name][i]));
        said.textContent = runs[run][name][i].toFixed(2);
      };
    });
    picture.addEventListener("click", (event) => {
      const box = picture.getBoundingClientRect();
      const update = (((event.clientX - box.left) * WIDTH) / box.width - LEFT) / (WIDTH - LEFT - RIGHT) * updates.at(-1);
      show(updates.reduce((best, u, i) => (Math.abs(u - update) < Math.abs(updates[best] - update) ? i : best), 0));
    });
    return (i) => {
      cursor.setAttribute("x1", x(updates[i]));
      cursor.setAttribute("x2", x(updates[i]));
      marks.forEach((mark) => mark(i));
    };
  }

  function answer(prompt, number) {
    const box = html("section", "answer", "", root.querySelector(".answers"));
    html("p", "prompt", prompt, box);
    const texts = Object.keys(names).map((run) => {
      const side = html("div", `response ${run}`, "", box);
      const text = html("p", "", "", side);
      const said = html("p", "figures", "", side);
      return (i) => {
        const { text: response, score, kl } = runs[run].answers[i][number];
        text.textContent = response;
        said.textContent = `score ${score.toFixed(2)}, KL ${kl.toFixed(1)}`;
      };
    });
    return (i) => texts.forEach((write) => write(i));
  }

  const parts = [...Object.keys(charts).map(chart), ...prompts.map(answer)];
  let timer = null;

  function show(i) {
    const at = Math.max(0, Math.min(updates.length - 1, i));
    slider.value = at;
    output.value = `update ${updates[at]} of ${updates.at(-1)}`;
    parts.forEach((part) => part(at));
  }

  function stop() {
    clearInterval(timer);
    timer = null;
    play.textContent = "Play";
    play.setAttribute("aria-pressed", "false");
  }

  play.addEventListener("click", () => {
    if (timer) return stop();
    if (Number(slider.value) === updates.length - 1) show(0);
    play.textContent = "Pause";
    play.setAttribute("aria-pressed", "true");
    timer = setInterval(() => (Number(slider.value) < updates.length - 1 ? show(Number(slider.value) + 1) : stop()), 400);
  });
  slider.addEventListener("input", () => (stop(), show(Number(slider.value))));
  root.querySelector(".back").addEventListener("click", () => (stop(), show(Number(slider.value) - 1)));
  root.querySelector(".on").addEventListener("click", () => (stop(), show(Number(slider.value) + 1)));
  show(0);
});
