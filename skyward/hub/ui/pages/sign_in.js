/** Sign-in with the one-time code that the hub printed. */
import { html, useEffect, useState } from "../core/html.js";
import { navigate, path } from "../core/router.js";
import { signIn } from "../core/session.js";
import { Paste } from "../parts/widgets.js";

/** The code in the link. It stands behind `#`, which browsers never send, so that no log has it. */
function codeInLink() {
  return new URLSearchParams(window.location.hash.slice(1)).get("code") ?? "";
}

/** Page to which the link leads. Only a path of this hub counts. */
function pageInLink() {
  const to = new URLSearchParams(window.location.hash.slice(1)).get("to") ?? "";
  return /^\/(?![/\\])/.test(to) ? to : "/experiments";
}

export function SignInPage() {
  const [code, setCode] = useState(codeInLink);
  const [target] = useState(pageInLink);
  const [problem, setProblem] = useState("");
  const enter = async (/** @type {string} */ given) => {
    setProblem("");
    try {
      await signIn(given.trim());
      navigate(path.value === "/sign-in" ? target : window.location.pathname + window.location.search, {
        replace: true,
      });
    } catch (error) {
      const { message, fix } = /** @type {{message: string, fix?: string}} */ (error);
      setProblem(fix ? `${message} ${fix}` : message);
    }
  };
  useEffect(() => {
    if (!codeInLink()) return;
    window.history.replaceState(null, "", window.location.pathname);
    void enter(code);
  }, []);
  document.title = "Sign in · skyward hub";
  return html`<main class="sign-in"><div class="card">
    <div class="brand"><img src="/ui/icon.svg" alt="" /><span>skyward hub</span></div>
    <h1>Sign in</h1>
    <form class="stack" onSubmit=${(/** @type {Event} */ event) => {
      event.preventDefault();
      void enter(code);
    }}>
      <label class="field">One-time code
        <input type="text" class="mono" name="code" autocomplete="one-time-code" autofocus spellcheck=${false} value=${code} aria-invalid=${String(Boolean(problem))} aria-describedby="code-help"
          onInput=${(/** @type {any} */ event) => setCode(event.target.value)} /></label>
      ${problem && html`<p class="field-error" role="alert">${problem}</p>`}
      <button class="button primary" type="submit" disabled=${!code.trim()}>Sign in</button></form>
    <p class="field-help" id="code-help">The hub printed a link with a code when it started. On the machine of the hub, this prints a new one:</p>
    <${Paste} text="skyward hub token --sign-in" /></div></main>`;
}
