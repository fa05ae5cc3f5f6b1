module poolwright.dev/testbed/helm

go 1.24.0
