"""What skyward ships for tests: conformance suites, fault injection, a pytest plugin."""
