from .diagnosis import Diagnosis as Diagnosis
from .diagnosis import diagnose as diagnose
from .report import diagnosis_summary as diagnosis_summary
from .report import publish_diagnosis as publish_diagnosis
