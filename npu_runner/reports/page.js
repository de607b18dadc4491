"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const input = $("search"), found = $("found"), elsewhere = $("elsewhere");
  const table = $("ids") ? JSON.parse($("ids").textContent) : [];
  const pages = table.length ? document.querySelector("nav.pages a[href$='2.html']").getAttribute("href").replace(/2\.html$/, "") : "";
  const address = (page, row) => `${page ? `${pages}${page + 1}.html` : ""}#${encodeURIComponent(row[1] || `row-${row[0]}`)}`;

  // A row's address leads to its page, wherever that is now.
  const follow = () => {
    let hash = location.hash.slice(1);
    try { hash = decodeURIComponent(hash); } catch (error) { return; }  // no address of ours
    if (!hash.startsWith("row") || document.getElementById(hash)) return;
    const page = table.findIndex((rows) => rows.some((row) => (row[1] || `row-${row[0]}`) === hash));
    if (page > 0) location.replace(`${pages}${page + 1}.html${location.hash}`);
  };
  addEventListener("hashchange", follow);
  follow();
  if (!input) return;

  let rows = null;
  const read = () => [...document.querySelectorAll("article")].map((article) => {
    const prompt = article.parentElement.querySelector(":scope > .prompt");
    return [article, `${article.textContent} ${prompt ? prompt.textContent : ""}`.toLowerCase()];
  });
  const hideEmpty = () => {
    for (const part of document.querySelectorAll(".group, .kind")) part.classList.toggle("off", !part.querySelector("article:not(.off)"));
  };
  const searchElsewhere = (words) => {
    const hits = [];
    for (let page = 1; words.length && page < table.length && hits.length < 40; page++)
      for (const row of table[page]) if (hits.length < 40 && words.every((word) => row[0].toLowerCase().includes(word))) hits.push([page, row]);
    elsewhere.replaceChildren(...hits.map(([page, row]) => {
      const item = document.createElement("li"), link = document.createElement("a");
      link.href = address(page, row);
      link.textContent = row[0];
      item.append(link, ` on page ${page + 1}`);
      return item;
    }));
    elsewhere.hidden = !hits.length;
  };
  const search = () => {
    rows = rows || read();
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const [article, text] of rows) {
      const is = words.every((word) => text.includes(word));
      article.classList.toggle("off", !is);
      count += is;
    }
    hideEmpty();
    searchElsewhere(words);
    found.textContent = words.length ? `${count} of ${rows.length}${table.length ? " on this page" : ""}` : "";
  };
  let timer = 0;
  input.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(search, 120); });
  addEventListener("keydown", (event) => {
    if (event.key === "/" && document.activeElement !== input && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      input.focus();
    } else if (event.key === "Escape") {
      if (document.activeElement === input && input.value) { input.value = ""; search(); return; }
      for (const picture of document.querySelectorAll("details.picture[open]")) picture.open = false;
    }
  });
  input.parentElement.hidden = false;
})();
