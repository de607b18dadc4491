"use strict";
(() => {
  const [tools, show, search, found] = ["tools", "show", "search", "found"].map((id) => document.getElementById(id));
  let rows = null;
  const update = () => {
    rows = rows || [...document.querySelectorAll("article")].map((article) => [article, article.textContent.toLowerCase()]);
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const [article, text] of rows) {
      const isShown = (!show.value || article.dataset.is.split(" ").includes(show.value)) && words.every((word) => text.includes(word));
      article.hidden = !isShown;
      count += isShown;
    }
    for (const section of document.querySelectorAll("section")) section.hidden = !section.querySelector("article:not([hidden])");
    found.textContent = show.value || words.length ? `${count} of ${rows.length}` : "";
  };
  let timer = 0;
  search.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(update, 120); });
  show.addEventListener("change", update);
  addEventListener("keydown", (event) => {
    if (event.key === "/" && document.activeElement !== search && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      search.focus();
    } else if (event.key === "Escape") {
      for (const image of document.querySelectorAll("details.image[open]")) image.open = false;
    }
  });
  tools.hidden = false;
})();
