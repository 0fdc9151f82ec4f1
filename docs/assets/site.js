// Links to tagged lines, and the filter of the page of details. (The animation has a file of its own.)
"use strict";

// A link to a tagged line shows the line from its start, and its card where the code stays in view while the notes scroll.
function showCard() {
  const tag = document.getElementById(location.hash.slice(1));
  if (!tag?.matches(".line .tag")) return;
  tag.closest("pre").scrollLeft = 0;
  const isSticky = getComputedStyle(tag.closest(".code")).position === "sticky";
  if (isSticky) document.querySelector(tag.hash).scrollIntoView({ behavior: "instant" });
}
for (const event of ["load", "hashchange"]) addEventListener(event, () => setTimeout(showCard, 100)); // after the browser's own jump

document.addEventListener("DOMContentLoaded", () => {
  const form = document.querySelector("form.filter");
  if (!form) return;
  const details = [...document.querySelectorAll(".detail")];
  const words = details.map((detail) => detail.textContent.toLowerCase());

  function filter() {
    const { script, phase } = form.elements;
    const wanted = form.elements.words.value.toLowerCase();
    const verdicts = [...form.querySelectorAll("[name=verdict]:checked")].map((box) => box.value);
    let count = 0;
    details.forEach((detail, i) => {
      const { scripts, phases, verdict } = detail.dataset;
      const isShown = (!script.value || scripts.split("|").includes(script.value))
        && (!phase.value || phases.split("|").includes(phase.value))
        && verdicts.includes(verdict) && words[i].includes(wanted);
      detail.hidden = !isShown;
      count += isShown;
    });
    form.querySelector("output").value = `${count} of ${details.length}`;
  }

  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  filter();
});
